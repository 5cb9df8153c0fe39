"""Encoders of transformers with a table of positions, and inputs that are longer than it.

Beyond its last row such a model (BERT, RoBERTa, ALBERT, DistilBERT ...) ends in an error of torch about shapes or an
index. A hook before its `forward` looks at the length first, and names the way out. It refuses nothing that would run:
position_ids that a caller passes are left alone, and where padding has a row of its own, as in RoBERTa, real tokens are
counted, if the input is longer than the table and only then. In other calls it compares two whole numbers. Compiled and
exported it leaves symbolic lengths alone, so that no bound becomes part of a graph.

Models that are made, loaded or set with the name of a method have the hook; one that was pickled keeps torch's error.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nystrom.integrations.bert_names import more_positions
from nystrom.private_torch import skip_code
from nystrom.shapes import is_number

# Names of the tables of learned positions in transformers' models.
_TABLES = ("position_embeddings", "position_embedding", "wpe")


class PositionCheck:
    """The hook of one model; it holds names alone, so that a copied model may share it.

    In a pickle it is a function that does nothing: a model that went back to another attention needs no package of
    ours to be loaded.
    """

    def __init__(self, model: PreTrainedModel, table: str):
        self._path = table.split(".")
        self._names = tuple(inspect.signature(type(model).forward).parameters)[1:]

    def __deepcopy__(self, memo: object) -> "PositionCheck":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")

    def __call__(self, model: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Raise ValueError if a call has more tokens than the table has rows."""
        given = dict(zip(self._names, args, strict=False)) | dict(named)
        ids, vectors = given.get("input_ids"), given.get("inputs_embeds")
        tokens = vectors if ids is None else ids
        if tokens is None or given.get("position_ids") is not None or tokens.ndim < 2:
            return
        table: Any = reduce(getattr, self._path, model)
        n, most = tokens.shape[1], rows_of(table)
        if not is_number(n) or n <= most:
            return
        if ids is not None and table.padding_idx is not None:
            if torch.compiler.is_compiling():
                # A compiler does not know which tokens are padding.
                return
            n = int((ids != table.padding_idx).sum(dim=1).max())
        if n > most:
            raise ValueError(
                f"{type(model).__name__} is given {n} tokens, and its table has {most} positions: "
                f"cut the texts to {most} tokens, as tokenizer(..., truncation=True) does, or "
                f"{more_positions(model.config, n)}."
            )


# Before a compiled model the hook would be a graph of its own, without an operation. Inside of one it is traced.
skip_code(PositionCheck.__call__.__code__)


def rows_of(table: nn.Embedding) -> int:
    """Positions that a table has for tokens: all rows, or those after the row of padding."""
    return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)


def table_of(model: nn.Module) -> str | None:
    """The name of a model's own table of positions; None if it has none, or a model inside it has it."""
    for name, child in model.named_children():
        if name in _TABLES and isinstance(child, nn.Embedding):
            return name
        if not isinstance(child, PreTrainedModel) and (inside := table_of(child)) is not None:
            return f"{name}.{inside}"
    return None


def watch_positions(part: nn.Module) -> list[Any]:
    """Let each model in a part refuse inputs that are longer than its table of positions; returns the new hooks'
    handles.
    """
    handles = []
    for model in part.modules():
        if not isinstance(model, PreTrainedModel) or (table := table_of(model)) is None:
            continue
        if not any(isinstance(hook, PositionCheck) for hook in model._forward_pre_hooks.values()):
            handles.append(model.register_forward_pre_hook(PositionCheck(model, table), with_kwargs=True))
    return handles


@contextmanager
def watched_positions(part: nn.Module) -> Iterator[None]:
    """`watch_positions` while a context lasts."""
    handles = watch_positions(part)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
