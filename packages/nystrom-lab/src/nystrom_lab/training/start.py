"""The saved model that a training starts from, as read and checked by every training."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nystrom.integrations.model_loader import read_model_config
from nystrom.json_files import read_json
from nystrom.models import EncoderConfig
from nystrom.models.files.loading import check_weights
from nystrom.models.files.model_fingerprint import model_fingerprint
from nystrom.models.files.published import PUBLISHED_TYPE
from nystrom_lab.config import FLAGS
from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.training.fitted_options import has_longest
from nystrom_lab.training.presets import MethodSetting, Preset
from nystrom_lab.training.run_progress import no_load_report

OWN_TYPES = (EncoderConfig.model_type, PUBLISHED_TYPE)


@dataclass(frozen=True)
class StartModel:
    """A saved model.

    Attributes:
        folder: Folder of the model.
        fingerprint: Identity of the model, see `nystrom.models.files.model_fingerprint`.
        config: Configuration; an `EncoderConfig` for a model of this library and a published Nyströmformer.
    """

    folder: Path
    fingerprint: str
    config: Any

    @property
    def own(self) -> bool:
        """Whether it is a model of this library."""
        return isinstance(self.config, EncoderConfig)

    @property
    def method(self) -> MethodSetting:
        """The attention, in the form of a preset; for a model of this library."""
        config = self.config
        return MethodSetting(config.attention_options, config.conv_kernel_size, config.share_attention_weights)


def find_start(folder: Path, kinds: Collection[str] | None = None, **changes: Any) -> StartModel:
    """Read the model of a folder.

    Args:
        kinds: The model types that the training accepts; None for all that transformers knows.
        **changes: Fields of the configuration of a model of this library, in place of its own.

    Raises:
        ValueError: The folder holds no model, one of another type, or no complete safetensors.
    """
    if not (folder / "config.json").is_file():
        check_weights(folder)
        raise ValueError(f"model is {folder}, which holds no config.json: name a saved model, such as RUN/best.")
    kind = model_type(folder)
    if kind is None or (kinds is not None and kind not in kinds):
        expected = "one" if kinds is None else " or ".join(map(repr, kinds))
        raise ValueError(f"model {folder} is of type {kind!r}; expected {expected}.")
    check_weights(folder)
    return StartModel(folder, model_fingerprint(folder), read_model_config(folder, **changes))


def load_start(folder: Path, kind: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Make the model that is trained, with the weights of a folder.

    Args:
        kind: Class of the model, one of this library.

    Returns:
        The model, and transformers' report of missing, unexpected and mismatched weights.

    Raises:
        ValueError: Weights that do not match.
    """
    # transformers would log a table of the new heads; every caller looks at the report.
    with no_load_report():
        return kind.from_pretrained(folder, output_loading_info=True, **options)


def model_type(folder: Path) -> str | None:
    """The type that the config.json of a folder names; None if there is none."""
    return read_json(folder / "config.json").get("model_type") if (folder / "config.json").is_file() else None


# Sizes of an encoder, by their names in presets and in `EncoderConfig`.
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "norm",
    "attention_size",
)


@dataclass(frozen=True)
class StartEncoder(StartModel):
    """A saved encoder of this library.

    Attributes:
        preset: Name of the preset that it was trained with; None if its folder is not in a run.
    """

    preset: str | None

    def settings(self) -> dict[str, Any]:
        """The other settings that a training can choose, by argument name."""
        same = ("rotary_share", "rotary_across_heads", "feed_forward", "design")
        others = {
            "position_kind": self.config.positions,
            "short_conv_kernel_size": self.config.short_conv_kernel_size or 0,
        }
        return {name: getattr(self.config, name) for name in same} | others

    def num_positions(self, base: Preset, of_data: int | None) -> int | None:
        """The positions of the model: the encoder's, or those of longer data if it has no weights per position.

        Args:
            of_data: Positions that the data need or the user requested; None for the preset's.

        Returns:
            None for those of the preset.

        Raises:
            ValueError: The requested length differs from that of its weights.
        """
        own, fixed = self.config.max_position_embeddings, self._fixed
        if fixed and of_data is not None and not LRA[base.task].any_size and of_data != own:
            raise ValueError(
                f"max_length is {of_data} but model {self.folder} has {fixed} {own} positions: leave it out, or "
                "pretrain another encoder with it."
            )
        if not fixed:
            own = max(own, base.data.max_length if of_data is None else of_data)
        return None if own == base.data.max_length else own

    @property
    def _fixed(self) -> str:
        """The part of it that has weights per position; "" for none."""
        if self.config.positions == "learned":
            return "a table of"
        return f"projections ({self.config.attention}) of" if has_longest(self.config.attention) else ""

    def check_longest(self, longest: int | None) -> None:
        """Check that its attention sees sequences of this length.

        Args:
            longest: Tokens, including the class token; None for those of its preset.

        Raises:
            ValueError: The model's projections are shorter.
        """
        own = self.config.attention_options.get("max_length")
        if longest is not None and isinstance(own, int) and own < longest:
            raise ValueError(
                f"model {self.folder} has projections ({self.config.attention}) of {own} positions, but sequences would"
                f" have {longest}, including the class token: use another pooling than 'cls', or pretrain "
                f"another encoder with --options.max-length {longest}."
            )

    def check(self, base: Preset, given: Mapping[str, object]) -> None:
        """Check that it is an encoder for a task and preset, and that no requested setting contradicts it.

        Args:
            given: Requested settings of the encoder, by argument name, options of the method as "options.NAME"; None if
                not given.

        Raises:
            ValueError: The first mismatch; the message names it and its value.
        """
        config, words = self.config, LRA[base.task].vocab_size
        if config.vocab_size != words:
            raise ValueError(
                f"model {self.folder} has vocab_size = {config.vocab_size} but {base.task} has {words} tokens: name an "
                f"encoder that was pretrained on it, by `nystrom pretrain {base.task}`."
            )
        for name in _SIZES:
            if (own := getattr(config, name)) != (wanted := getattr(base, name)):
                raise ValueError(
                    f"model {self.folder} has {name} = {own} but preset {base.name} has {wanted}: leave --preset out, "
                    "or name the one that the encoder was trained with."
                )
        mine = {"attention": config.attention, "conv_kernel_size": config.conv_kernel_size or 0} | self.settings()
        mine |= {f"options.{name}": value for name, value in config.attention_options.items()}
        for name, value in given.items():
            if value is not None and value != mine.get(name):
                had = repr(mine[name]) if name in mine else "the default"
                raise ValueError(
                    f"{FLAGS.get(name, name)} is {value!r} but model {self.folder} was trained with {had}: leave it "
                    "out, or pretrain another encoder with it."
                )


def find_encoder(folder: Path) -> StartEncoder:
    """Read the encoder of a folder.

    Raises:
        ValueError: The folder holds no model, another kind of model, or no complete safetensors.
    """
    start = find_start(folder, kinds=[EncoderConfig.model_type])
    run = folder.parent / "run.json"
    settings = read_json(run).get("settings") if run.is_file() else None
    preset = settings.get("preset") if isinstance(settings, dict) else None
    return StartEncoder(folder, start.fingerprint, start.config, preset)
