"""A whole encoder with random weights as a contender, so that `interleaved` measures it as it measures one attention.

The encoder is `nystrom.models.EncoderModel` with the norm after each block, as in BERT. Dropout is off. The forward
pass goes from random tokens to the last hidden states; the backward pass starts from a random gradient of these, and
ends with the gradients of all weights, including the embeddings.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nystrom.models import EncoderConfig, EncoderModel
from nystrom_lab.studies.speed.contenders.inputs import Call, Inputs
from nystrom_lab.studies.speed.contenders.table import Contender, Ours, find_contender
from nystrom_lab.studies.speed.lra_models import find_method
from nystrom_lab.studies.speed.whole_model.sizes import EncoderSizes


@dataclass(frozen=True)
class EncoderWith:
    """Builder of an encoder with a method of this library.

    Attributes:
        method: The method.
        sizes: Sizes of the encoder.
        seed: Seed of its weights and its tokens.
    """

    method: Ours
    sizes: EncoderSizes
    seed: int

    def __call__(self, inputs: Inputs, number: int, skip: bool) -> Call:
        """Build it, see `Contender.build`; of the inputs only length, sizes and gradient matter."""
        config = EncoderConfig(
            vocab_size=self.sizes.vocabulary,
            hidden_size=self.sizes.width,
            num_hidden_layers=self.sizes.layers,
            num_attention_heads=self.sizes.heads,
            intermediate_size=self.sizes.intermediate,
            max_position_embeddings=inputs.n,
            attention=self.method.method,
            attention_options=self.method.options_at(number, inputs.n),
            conv_kernel_size=inputs.sizes.kernel_size if skip else None,
        )
        torch.manual_seed(self.seed)
        model = EncoderModel(config).eval()
        model.to(inputs.sizes.device, inputs.sizes.dtype)  # pyright: ignore[reportArgumentType] (transformers hides its type)
        generator = torch.Generator().manual_seed(self.seed)
        shape = (inputs.sizes.batch, inputs.n)
        ids = torch.randint(1, self.sizes.vocabulary, shape, generator=generator).to(inputs.sizes.device)

        def forward() -> Tensor:
            return model(input_ids=ids).last_hidden_state

        return Call(forward, tuple(model.parameters()))


def encoder_finder(sizes: EncoderSizes, seed: int) -> Callable[[str], tuple[Contender, int]]:
    """A function like `find_contender`, but from a name such as "nystrom-64" to the encoder with that attention.

    The function raises ValueError as `find_method` does.
    """

    def find(name: str) -> tuple[Contender, int]:
        method, number = find_method(name)
        return replace(find_contender(name)[0], build=EncoderWith(method, sizes, seed)), number

    return find
