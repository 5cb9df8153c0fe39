"""Record the estimated error of each layer and head while a model runs on what its users send.

`monitor_errors` looks at the queries, keys and values of each layer, and at the output that its method gave; the output
stays what it is, to the bit. The estimate is that of `nystrom.attention.parts.error_estimate`.

Monitored are layers of transformers models that are set to a method of this library, and those that hold one
(`nystrom.models`, `nystrom.MultiheadAttention`, what `nystrom.replace_attention` put in), if the method approximates
softmax attention. `left` names all others, and why: exact layers; methods with a kernel or rule of their own ("linear",
"kernelized", "skyformer", "reformer"); and calls that are causal, of packed sequences, with a bias of positions, or
split across ranks.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from nystrom.attention.heads import AttentionHeads
from nystrom.attention.parts.error_estimate import check_eager, estimate_errors
from nystrom.attention.registry import METHODS
from nystrom.attention.skip import depthwise_skip
from nystrom.checks import check_at_least
from nystrom.shapes import Masks

_EXACT, _CAUSAL, _PACKED, _RANKS = "exact attention", "causal", "packed sequences", "tokens split across ranks"
_BIASED = "a bias of positions"


@dataclass(frozen=True)
class LayerErrors:
    """The estimates of one layer.

    Attributes:
        name: Name in the model.
        method: The method.
        calls: Recorded calls.
        sequences: Sequences of these calls that have a real token.
        mean: Mean estimate of each head over the sequences.
        largest: Largest estimate of each head in any sequence.
    """

    name: str
    method: str
    calls: int
    sequences: int
    mean: tuple[float, ...]
    largest: tuple[float, ...]


class MonitoredErrors:
    """The records of `monitor_errors` so far; `print` shows it as a table, with the head of the largest estimate.

    Attributes:
        left: Layers of which no call was recorded, or not every one, and why.
    """

    def __init__(self):
        self.recorded: dict[tuple[str, str], _Recorded] = {}
        self.left: dict[str, str] = {}

    @property
    def rows(self) -> tuple[LayerErrors, ...]:
        """The layers with recorded calls, in the order in which they first ran."""
        return tuple(layer.row(*place) for place, layer in self.recorded.items())

    def __str__(self) -> str:
        table = [("layer", "method", "calls", "sequences", "mean", "largest", "head")]
        for row in self.rows:
            largest, mean = max(row.largest), sum(row.mean) / len(row.mean)
            counts = row.name, row.method, f"{row.calls:,}", f"{row.sequences:,}"
            table.append((*counts, f"{mean:.3f}", f"{largest:.3f}", f"{row.largest.index(largest)}"))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = []
        for name, method, *numbers in table:
            right = (number.rjust(width) for number, width in zip(numbers, widths[2:], strict=True))
            lines.append("  ".join([name.ljust(widths[0]), method.ljust(widths[1]), *right]))
        return "\n".join([*lines, *(f"left out: {name} ({why})" for name, why in self.left.items())])


class _Recorded:
    """The recorded calls of a layer, on the device of its tensors: nothing waits for a GPU."""

    def __init__(self, heads: int, device: torch.device):
        self.calls, self.sequences = 0, torch.zeros((), dtype=torch.long, device=device)
        self.mean, self.largest = torch.zeros(2, heads, device=device)

    def add(self, errors: Float[Tensor, "b h"], real: Bool[Tensor, " b"]) -> None:
        """Add the estimates of a call; sequences without a real token have none."""
        errors = torch.where(real[:, None], errors, 0.0).to(self.mean)
        self.calls += 1
        self.sequences = self.sequences + real.sum()
        # A sum over days would lose the digits of the next call.
        self.mean = self.mean + (errors.sum(dim=0) - real.sum() * self.mean) / self.sequences.clamp(min=1)
        self.largest = torch.cat([errors, self.largest[None]]).amax(dim=0)

    def row(self, name: str, method: str) -> LayerErrors:
        """The records of a layer, as numbers."""
        numbers = (tuple(each.tolist()) for each in (self.mean, self.largest))
        return LayerErrors(name, method, self.calls, int(self.sequences), *numbers)


class _Monitor:
    """Counts the calls of each layer, and records those that are due."""

    def __init__(self, every: int):
        self.every, self.errors = every, MonitoredErrors()
        self.seen = Counter[tuple[str, str]]()

    def is_due(self, name: str, method: str, q: Tensor, reasons: Mapping[str, bool]) -> bool:
        """Whether to record a call; `reasons` say why not."""
        reasons = {
            **reasons,
            _EXACT: reasons.get(_EXACT, False) or method == "softmax",
            f"{method} attention has a kernel or rule of its own": not is_monitored(method),
        }
        for why, is_so in reasons.items():
            if is_so:
                self.errors.left[name] = why
                return False
        check_eager("monitor_errors is on", q)
        self.seen[name, method] += 1
        return (self.seen[name, method] - 1) % self.every == 0

    @torch.no_grad()
    def record(self, name: str, method: str, call: Sequence[Tensor], masks: Masks, scale: float | None) -> None:
        """Estimate the errors of a call, of queries, keys, values and outputs, and add them."""
        keep, query_keep = masks.settled()
        q, k, v, out = call
        errors = estimate_errors(q, k, v, out, keep, query_keep, scale=scale)
        real = torch.ones_like(errors[:, 0], dtype=torch.bool) if query_keep is None else query_keep.any(dim=1)
        layer = self.errors.recorded.setdefault((name, method), _Recorded(errors.shape[1], errors.device))
        layer.add(errors, real)


def is_monitored(method: str) -> bool:
    """Whether a method approximates softmax attention."""
    return METHODS[method].exact_limit.startswith("softmax,")


@contextmanager
def monitor_errors(model: nn.Module, every: int = 1) -> Iterator[MonitoredErrors]:
    """Record the estimated error of each layer and head of a model while this context lasts; outputs do not change.

    Args:
        model: An encoder of transformers that is set to a method, a model of `nystrom.models`, or any Module that holds
            attention of this library, see `nystrom.replace_attention`.
        every: Record each `every`-th call of a layer, the first one among them.

    Returns:
        The context of a `MonitoredErrors`, which can be read within it and afterwards.

    Raises:
        ValueError: The model holds no attention of this library; or, when it runs, it is compiled, exported or
            transformed.
    """
    check_at_least("every", every, 1)
    monitor = _Monitor(every)
    heads = {module: name for name, module in model.named_modules() if isinstance(module, AttentionHeads)}
    methods = _methods_of_interface(model)
    if not heads and not methods:
        raise ValueError(
            f"{type(model).__name__} holds no attention of this library and is not set to a method of it: see "
            "nystrom.replace_attention, and attn_implementation of models of transformers."
        )
    with ExitStack() as stack:
        for module, name in heads.items():
            stack.enter_context(_watched_heads(module, name, monitor))
        for method in methods:
            stack.enter_context(_watched_interface(model, method, monitor))
        yield monitor.errors


@contextmanager
def _watched_heads(module: AttentionHeads, name: str, monitor: _Monitor) -> Iterator[None]:
    """Record the calls of a method that a layer holds."""
    own, attend = module.__dict__.get("forward"), module.forward

    def forward(q: Tensor, k: Tensor, v: Tensor, *, skip: Tensor | None = None, **named: Any) -> Tensor:
        out = attend(q, k, v, skip=skip, **named)
        reasons = {
            _RANKS: module.group is not None,
            _CAUSAL: bool(named.get("is_causal")),
            _PACKED: named.get("cu_seqlens") is not None,
            _BIASED: named.get("bias") is not None,
        }
        if monitor.is_due(name, module.method, q, reasons):
            masks = Masks(*(named.get(key) for key in Masks._fields))
            with torch.no_grad():
                attended = out if skip is None else out - depthwise_skip(v, skip, keep=masks.keep)
            scale = getattr(module.options, "scale", None)
            monitor.record(name, module.method, (q, k, v, attended), masks, scale)
        return out

    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _methods_of_interface(model: nn.Module) -> tuple[str, ...]:
    """The methods of this library, and plans, that parts of a transformers model are set to."""
    if find_spec("transformers") is None:
        return ()
    from nystrom.integrations.attention_interface import SERVED

    configs = (getattr(module, "config", None) for module in model.modules())
    methods = (getattr(config, "_attn_implementation", None) for config in configs)
    return tuple(dict.fromkeys(method for method in methods if method in SERVED))


def _watched_interface(model: nn.Module, method: str, monitor: _Monitor) -> AbstractContextManager[None]:
    """Record the calls of layers of a transformers model that ask its AttentionInterface for a method."""
    from transformers.integrations.sdpa_attention import repeat_kv

    from nystrom.integrations.attention_interface import GROUP, Route, masks_of
    from nystrom.integrations.layer_calls import watched

    names = {module: name for name, module in model.named_modules()}

    def see(module: nn.Module, route: Route, tensors: tuple[Tensor, ...], scale: float | None) -> None:
        query, key, value, out = tensors
        name = names.get(module)
        if name is None:
            # Another model, with the same method.
            return
        reasons = {
            _RANKS: getattr(module, GROUP, None) is not None,
            _PACKED: route.cu_seqlens is not None,
            _EXACT: route.exact,
            _BIASED: route.bias is not None,
            _CAUSAL: route.causal,
        }
        if monitor.is_due(name, route.method, query, reasons):
            groups = query.shape[1] // key.shape[1]
            keys, values = repeat_kv(key, groups), repeat_kv(value, groups)
            masks = masks_of(module, query, key, route.keep, declared=METHODS[route.method].positional)
            monitor.record(name, route.method, (query, keys, values, out.transpose(1, 2)), masks, scale)

    return watched(method, see)
