"""Time and peak memory of a whole encoder over the number of tokens, with exact attention and with other methods.

The Nyströmformer paper reports "significant speedups" over BERT (section 1), and measures one attention module (section
5, Table 1). A model also has projections, feed-forward blocks and embeddings, which cost the same with every method.
The model's ratio is therefore nearer to one than that of the attention alone, the more so the shorter the text and the
wider the model.

The encoder is `nystrom.models.EncoderModel` with the norm after each block, as in BERT, with random weights and without
dropout. The forward pass goes from random tokens to the last hidden states; the backward pass starts from a random
gradient of these, and ends with the gradients of all weights, including the embeddings. Each method is measured in
both, in turn with the others: see `nystrom_papers.bench.by_length`. Memory is the peak beyond weights and inputs,
gradients of the weights included.

Source: Xiong et al. (2021), arXiv:2102.03902, sections 1 and 5; Devlin et al. (2018), arXiv:1810.04805, for the sizes
of BERT-base.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nystrom.checks import check_at_least
from nystrom.whole_files import check_folder
from nystrom_lab.measure.rows import Row
from nystrom_papers.bench.options import LengthOptions, Skip, command_line, find_device

if TYPE_CHECKING:
    from torch import Tensor

    from nystrom_papers.bench.contenders import Contender, Ours
    from nystrom_papers.bench.inputs import Call, Inputs

# The fields of a configuration of transformers; DistilBERT has another name for the intermediate size.
_FIELDS = {
    "layers": ("num_hidden_layers",),
    "width": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "intermediate": ("intermediate_size", "hidden_dim"),
    "vocabulary": ("vocab_size",),
}


@dataclass(frozen=True, kw_only=True)
class ModelOptions(LengthOptions):
    """Measure time and peak memory of a whole encoder with each attention side by side, over the number of tokens.

    The encoder has BERT-base's sizes and random weights. On two cores, take --layers 2: the ratios of time hardly
    change, since all layers cost the same. Rows go to model.csv in the folder, a length at a time. The same command
    continues an interrupted run and skips the lengths that are done.

    Attributes:
        methods: Methods of this library with their number, such as softmax, nystrom-64, linformer-256; softmax is exact
            attention in one fused call. Ratios are taken against the first.
        model: Folder of an encoder whose sizes are taken, from its config.json; its weights are not needed.
        layers: Layers; those of the model, or 12, if not given.
        width: Width of a token; the model's, or 768.
        heads: Heads; the model's, or 12.
        intermediate: Width inside the feed-forward block; the model's, or 3072.
        to: Folder of the results.
    """

    methods: tuple[str, ...] = ("softmax", "nystrom-64")
    skip: Skip = "with"
    model: Path | None = None
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    intermediate: int | None = None
    repeats: int = 5
    limit_seconds: float = 300.0
    to: Path = Path("runs/model")


def run_model(options: ModelOptions) -> list[Row]:
    """Measure the rows of `ModelOptions`.

    Raises:
        ValueError: An unknown, missing or out-of-range argument, or a folder that holds another setting.
    """
    sizes = {name: getattr(options, name) for name in ("layers", "width", "heads", "intermediate")}
    encoder = find_sizes(options.model, **sizes)
    import torch

    from nystrom_papers.bench.by_length import cells_of, length_setup, sweep_lengths
    from nystrom_papers.bench.inputs import Sizes

    place, head_width = find_device(options.device), encoder.width // encoder.heads
    dtype, find = getattr(torch, options.dtype), encoder_finder(encoder, options.seed)
    # Rows name a model without the machine's folders.
    named = vars(options) | {"model": None if options.model is None else Path(options.model.name)}
    setup = length_setup(
        options,
        "model",
        cells=cells_of(options.methods, options.passes, options.skip, place, find, options.launches),
        sizes=Sizes(options.batch, encoder.heads, head_width, options.kernel_size, dtype, place, "tokens"),
        shape={"b": options.batch, **asdict(encoder), "kernel": options.kernel_size},
        command=command_line(("nystrom", "bench", "model"), ModelOptions, named, "lengths"),
    )
    check_folder(options.to)
    return sweep_lengths(options.lengths, setup, options.to / "model.csv")


@dataclass(frozen=True)
class EncoderSizes:
    """Sizes that all methods share; the defaults are those of BERT-base."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    intermediate: int = 3072
    vocabulary: int = 30522


def find_sizes(model: Path | None, **changes: int | None) -> EncoderSizes:
    """The sizes that were given, by name or by a model.

    Args:
        model: Folder of an encoder, of which only config.json is read; None for BERT-base.
        **changes: Fields of `EncoderSizes`; None for those of the model.

    Raises:
        ValueError: The folder holds no encoder that transformers knows, a size is out of range, or the model is larger
            than the memory.
    """
    for name, value in changes.items():
        if value is not None:
            check_at_least(name, value, 1)
    sizes = EncoderSizes() if model is None else _sizes_of(model)
    sizes = replace(sizes, **{name: value for name, value in changes.items() if value is not None})
    if sizes.width % sizes.heads:
        raise ValueError(f"width is {sizes.width} but heads is {sizes.heads}; expected a multiple of the heads.")
    from nystrom_lab.measure.memory import check_memory

    check_memory(**{name: size for name, size in asdict(sizes).items() if name != "heads"}, numbers=1)
    return sizes


def _sizes_of(model: Path) -> EncoderSizes:
    from nystrom.integrations.model_loader import read_model_config

    config = read_model_config(model)
    sizes: dict[str, int] = {}
    for name, candidates in _FIELDS.items():
        values = [getattr(config, candidate, None) for candidate in candidates]
        size = next((value for value in values if isinstance(value, int)), None)
        if size is None:
            raise ValueError(
                f"model {model} is of type {config.model_type!r}, whose config.json has no {' or '.join(candidates)}: "
                "name an encoder such as BERT, or give the sizes with layers, width, heads and intermediate."
            )
        sizes[name] = size
    return EncoderSizes(**sizes)


@dataclass(frozen=True)
class EncoderWith:
    """Builder of an encoder with a method of this library, see `Contender.build`."""

    method: "Ours"
    sizes: EncoderSizes
    seed: int

    def __call__(self, inputs: "Inputs", number: int, skip: bool) -> "Call":
        """Build it; of the inputs only length, sizes and gradient matter."""
        import torch

        from nystrom.models import EncoderConfig, EncoderModel
        from nystrom_papers.bench.inputs import Call

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

        def forward() -> "Tensor":
            return model(input_ids=ids).last_hidden_state

        return Call(forward, tuple(model.parameters()))


def encoder_finder(sizes: EncoderSizes, seed: int) -> "Callable[[str], tuple[Contender, int]]":
    """A function like `find_contender`, but from a name such as "nystrom-64" to the encoder with that attention.

    The function raises ValueError as `find_method` does.
    """
    from nystrom_papers.bench.contenders import find_contender, find_method

    def find(name: str) -> "tuple[Contender, int]":
        method, number = find_method(name)
        return replace(find_contender(name)[0], build=EncoderWith(method, sizes, seed)), number

    return find
