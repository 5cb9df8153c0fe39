"""The sizes of an encoder; those of BERT-base by default.

Source: Devlin et al. (2018), arXiv:1810.04805, for BERT-base.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from nystrom.checks import check_at_least

# The fields of a configuration of transformers; DistilBERT has another name for the intermediate size.
_FIELDS = {
    "layers": ("num_hidden_layers",),
    "width": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "intermediate": ("intermediate_size", "hidden_dim"),
    "vocabulary": ("vocab_size",),
}


@dataclass(frozen=True)
class EncoderSizes:
    """Sizes that all methods share; the defaults are those of BERT-base.

    Attributes:
        layers: Layers.
        width: Width of a token, a multiple of the heads.
        heads: Heads.
        intermediate: Width inside the feed-forward block.
        vocabulary: Tokens of the vocabulary.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    intermediate: int = 3072
    vocabulary: int = 30522


def find_sizes(model: Path | None, **asked: int | None) -> EncoderSizes:
    """The sizes that were given, by name or by a model.

    Args:
        model: Folder of an encoder, of which only config.json is read; None for BERT-base.
        **asked: Fields of `EncoderSizes`; None for those of the model.

    Raises:
        ValueError: The folder holds no encoder that transformers knows, a size is out of range, or the model is larger
            than the memory.
    """
    for name, value in asked.items():
        if value is not None:
            check_at_least(name, value, 1)
    sizes = EncoderSizes() if model is None else _sizes_of(model)
    sizes = replace(sizes, **{name: value for name, value in asked.items() if value is not None})
    if sizes.width % sizes.heads:
        raise ValueError(f"width is {sizes.width} but heads is {sizes.heads}; expected a multiple of the heads.")
    # The check of memory imports torch, which the help of the commands need not wait for.
    from nystrom.models.memory import check_memory

    check_memory(
        layers=sizes.layers,
        width=sizes.width,
        intermediate=sizes.intermediate,
        vocabulary=sizes.vocabulary,
        numbers=1,
    )
    return sizes


def _sizes_of(model: Path) -> EncoderSizes:
    from transformers import AutoConfig

    # Registers the configurations of this library.
    import nystrom.models  # noqa: F401
    from nystrom.models.files.json_object import read_json

    kind = read_json(model / "config.json").get("model_type")
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"model {model} is of type {kind!r}, which transformers does not know ({error}).") from error
    found: dict[str, int] = {}
    for name, candidates in _FIELDS.items():
        values = [getattr(config, candidate, None) for candidate in candidates]
        size = next((value for value in values if isinstance(value, int)), None)
        if size is None:
            raise ValueError(
                f"model {model} is of type {kind!r}, whose config.json has no {' or '.join(candidates)}: name an "
                "encoder such as BERT, or give the sizes with layers, width, heads and intermediate."
            )
        found[name] = size
    return EncoderSizes(**found)
