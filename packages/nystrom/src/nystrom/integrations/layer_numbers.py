"""The layer numbers that plans and `exact_layers` use for a transformers model.

In many families layers know their number, as `layer_idx`. In others (DistilBERT, ViT, Wav2Vec2) the layers form one
list, and `number_layers` sets their place in it. The number lives in memory only and is not saved. A layer that runs
several times (ALBERT) has no number.
"""

from torch import nn
from transformers import PreTrainedModel

# Attribute of a layer without `layer_idx`: its place.
PLACE = "_nystrom_place"


def number_of(module: nn.Module) -> int | None:
    """The number of a layer; None if it has none."""
    number = getattr(module, "layer_idx", None)
    return getattr(module, PLACE, None) if number is None else number


def number_layers(part: PreTrainedModel) -> None:
    """Number the layers of a model that have no number; ValueError as for `find_places`, nothing is then changed."""
    for module, place in find_places(part).items():
        module.__dict__[PLACE] = place


def find_places(part: PreTrainedModel) -> dict[nn.Module, int]:
    """The place of each layer that has no number, in a model that asks transformers' AttentionInterface, or its
    encoder.

    Raises:
        ValueError: These layers do not form one list of `num_hidden_layers`.
    """
    layers = {
        name: module
        for name, module in part.named_modules()
        if hasattr(module, "is_causal") and getattr(module, "layer_idx", None) is None
    }
    if not layers:
        return {}
    count = getattr(part.config, "num_hidden_layers", None)
    if len(layers) != count or not _is_list(list(layers)):
        name, layer = next(iter(layers.items()))
        raise ValueError(
            f"the layers of {type(part).__name__} have no numbers by which a plan or exact_layers could name them: "
            f"{type(layer).__name__} has none (layer_idx), and there are {len(layers)} of them, the first at {name}, "
            f"which do not form one list of num_hidden_layers={count}. Set one method for all layers, or pass the part "
            "of the model that holds one list."
        )
    return {module: place for place, module in enumerate(layers.values())}


def _is_list(names: list[str]) -> bool:
    """Whether the names differ in a single word that counts from 0."""
    words = [name.split(".") for name in names]
    if len({len(each) for each in words}) != 1:
        return False
    counted = [str(place) for place in range(len(names))]
    return all(len(set(column)) == 1 or list(column) == counted for column in zip(*words, strict=True))
