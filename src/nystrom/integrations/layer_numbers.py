"""The numbers by which plans and `exact_layers` name the layers of a transformers model.

Layers of many families know theirs, as `layer_idx`. Others (DistilBERT, ViT, Wav2Vec2) stand in one list that runs from
its first to its last: `number_layers` tells them their place there. They keep it while the model is in memory, and no
folder holds it. A layer that runs several times (ALBERT) has no number.
"""

from torch import nn
from transformers import PreTrainedModel

# Attribute of a layer without `layer_idx`: its place.
PLACE = "_nystrom_place"


def number_of(module: nn.Module) -> int | None:
    """The number of a layer; None where it was told none."""
    number = getattr(module, "layer_idx", None)
    return getattr(module, PLACE, None) if number is None else number


def number_layers(part: PreTrainedModel) -> None:
    """Tell the layers of a model that know no number their place.

    Raises:
        ValueError: As for `find_places`; nothing is changed.
    """
    for module, place in find_places(part).items():
        module.__dict__[PLACE] = place


def find_places(part: PreTrainedModel) -> dict[nn.Module, int]:
    """The place of each layer of a model that knows no number.

    Args:
        part: A model that asks transformers' AttentionInterface, or its encoder.

    Raises:
        ValueError: These layers are not one list, as long as the configuration says that the model has layers.
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
            f"{type(layer).__name__} knows none (layer_idx), and there are {len(layers)} of them, the first at {name}, "
            f"which are not one list of num_hidden_layers={count}. Set one method for all layers, or pass the part of "
            "the model that holds one list."
        )
    return {module: place for place, module in enumerate(layers.values())}


def _is_list(names: list[str]) -> bool:
    """Whether names differ in one word alone, which counts from 0."""
    words = [name.split(".") for name in names]
    if len({len(each) for each in words}) != 1:
        return False
    counted = [str(place) for place in range(len(names))]
    return all(len(set(column)) == 1 or list(column) == counted for column in zip(*words, strict=True))
