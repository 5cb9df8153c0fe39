"""Matrices of the heads that figures show, kept as arrays in the folder of a study: maps-LAYER.npz."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.whole_files import whole_bytes
from nystrom_papers.studies.approximation.real_heads.recorded import LayerHeads

_MOST = torch.finfo(torch.float32).max


def save_pictures(heads: LayerHeads, maps: Mapping[str, Float[Tensor, "b h *shape"]], folder: Path) -> None:
    """Save, for the first text, what figures show of the heads of a layer, as arrays in the folder of the study.

    `maps` has, by name, a matrix or a number for each head; of a matrix the means of its blocks are saved.
    """
    arrays = {
        f"{head}/{name}": block_means(values[0, head]).clamp(-_MOST, _MOST).float().numpy()
        for head in heads.shown
        for name, values in maps.items()
    }
    if arrays:
        with whole_bytes(folder / _file(heads.layer)) as file:
            np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]


def read_pictures(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """The arrays of `save_pictures`, by head, such as "layer 2, head 6", and by name.

    Raises:
        ValueError: There are none.
    """
    heads: dict[str, dict[str, np.ndarray]] = {}
    for file in sorted(folder.glob(_file("*")), key=lambda file: int(file.stem.rpartition("-")[2])):
        layer = int(file.stem.rpartition("-")[2])
        with np.load(file, allow_pickle=False) as arrays:
            for key in arrays.files:
                head, _, name = key.partition("/")
                heads.setdefault(f"layer {layer + 1}, head {int(head) + 1}", {})[name] = arrays[key]
    if not heads:
        raise ValueError(f"{folder} has rows but no maps-*.npz, so its figure cannot be drawn: choose another --to.")
    return heads


def block_means(x: Float[Tensor, "*shape"], most: int = 128) -> Float[Tensor, "*smaller"]:
    """The means of the blocks of a matrix, each of whose axes is cut into at most `most` near-equal stretches."""
    for axis, size in enumerate(x.shape):
        if size > most:
            x = torch.stack([part.mean(dim=axis) for part in x.tensor_split(most, dim=axis)], dim=axis)
    return x


def _file(layer: int | str) -> str:
    return f"maps-{layer}.npz"
