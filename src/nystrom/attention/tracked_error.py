r"""A running estimate of a layer's error against exact attention during training, from a few queries per step.

Each training step samples two heads. Of each sequence t, $r_t = \min(8, N_t)$ of its $N_t$ real queries are taken, with
the layer's outputs $\hat o_i$ there, without the skip convolution, and the exact outputs $o_i = \mathrm{softmax}(c\,
q_i^\top K^\top)\, V$ over the real keys. With $\gamma = 2^{-1/100}$, which is a half-life of 100 steps,
$$A \leftarrow \gamma A + \sum_t \frac{N_t}{r_t} \sum_i \|\hat o_i - o_i\|^2, \qquad
B \leftarrow \gamma B + \sum_t \frac{N_t}{r_t} \sum_i \|o_i\|^2, \qquad \text{error} = \sqrt{A / B}$$
for each head: for the sequences of one step, this is the estimate of `nystrom.inspection.sampling`. The weights change
while the sums run, so the estimate is a mean over the last few hundred steps, not the error of the current weights. If
a layer is so small that sampling would take more than a few per cent of its time, only every few steps are sampled, at
least every 16th; a compiled model is sampled in every step. Recomputation by gradient checkpointing does not count as a
step. For a method that does not approximate softmax attention, such as "kernelized", the estimate is its distance from
softmax attention.

Choice of queries: the real queries of a sequence are split into r equal stretches, and one query is taken from each.
Its position in the stretch follows a Weyl sequence in the numbers of the step and the stretch (multiples of 1 / p and
1 / p^2, p the plastic number). The heads follow another one (multiples of the golden ratio). So all queries and heads
are sampled over time, padding changes nothing, and no random number is drawn: training is bit-for-bit the same as
without the estimate.

The sums belong to the process and are not in the state dict: under DistributedDataParallel each process has its own.
Steps whose results are not finite are skipped, as are sequences without a real query.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nystrom.attention.fused import softmax_rows
from nystrom.autograd_modes import is_computed_again
from nystrom.landmarks import GOLDEN_RATIO, ranks, take
from nystrom.precision import at_least_float32, without_autocast
from nystrom.shapes import Masks, zero_masked

# Number of steps after which the weight of a step has halved.
HALF_LIFE = 100
# Queries per sequence, and heads, that a step samples.
QUERIES, HEADS = 8, 2
# Fractions in units of 1 / _UNIT: 1 / p and 1 / p^2 for the plastic number p, and the golden ratio.
_UNIT = 2**24
_OF_STEP, _OF_STRETCH = round(0.7548776662466927 * _UNIT), round(0.5698402909980532 * _UNIT)
_OF_HEADS = round(GOLDEN_RATIO * _UNIT)
# A layer is sampled every min(_APART, _WORTH / work) steps, where the work of a step is tokens times squared width.
_APART, _WORTH = 16, 2**29


class TrackedError(nn.Module):
    """The running sums of one layer.

    Args:
        num_heads: Heads.
    """

    # Plain attributes: DistributedDataParallel would overwrite buffers with those of the first process, `to(dtype)`
    # would round them, and a model made on the meta device would lose them.
    _sums: Float[Tensor, "3 h"]
    _step: Int[Tensor, ""]
    # It needs the keys of all tokens, and a rank holds only its own: see `nystrom.parallel.models`.
    over_ranks = False

    def __init__(self, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.restart()

    def restart(self, step: int = 0) -> None:
        """Forget all steps.

        Args:
            step: Number of the next step, which determines the sampled queries.
        """
        self._sums = torch.zeros(3, self.num_heads, device="cpu", dtype=torch.float32)
        self._step = torch.tensor(step, device="cpu")
        self._passed, self._begun = 0, False

    def forget(self) -> None:
        """Reset the errors, sample the next step, and continue with other queries."""
        self._sums.zero_()
        self._step += self._passed
        self._passed, self._begun = 0, False

    def value(self) -> Float[Tensor, " h"]:
        """The relative error of each head; NaN before its first sample."""
        off, size, seen = self._sums
        error = torch.where(size > 0, off / size, 0.0).sqrt()
        return torch.where(seen > 0, error, torch.nan)

    @torch.no_grad()
    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h s d"],
        v: Float[Tensor, "b h s e"],
        out: Float[Tensor, "b h n e"],
        *,
        masks: Masks,
        skip: Float[Tensor, "h 1 taps 1"] | None,
        scale: float | None,
    ) -> None:
        """Sample a training step; does nothing in evaluation.

        Args:
            q: Queries.
            k: Keys.
            v: Values.
            out: The layer's output.
            masks: Which tokens are real.
            skip: Kernel of the skip convolution that is included in `out`.
            scale: Factor on the scores; None means 1 / sqrt(d).

        Raises:
            ValueError: Training inside torch.export or torch.func, or in nn.DataParallel.
        """
        if not self.training or not all((q.shape[0], q.shape[2], k.shape[2])):
            return
        self._check_place()
        if is_computed_again():
            return
        passed = 1 if torch.compiler.is_compiling() else self._steps_since(q)
        if not passed:
            return
        if self._sums.device != q.device:
            self._sums, self._step = self._sums.to(q.device), self._step.to(q.device)
        keep, query_keep = masks.settled()
        with without_autocast(q):
            each = min(HEADS, self.num_heads)
            first = self._step * _OF_HEADS % _UNIT * self.num_heads // _UNIT
            heads = (first + torch.arange(each, device=q.device)) % self.num_heads
            places, shares = self._sample(q, query_keep)
            k, v = (at_least_float32(x.index_select(1, heads)) for x in (k, v))
            v = zero_masked(v, keep)
            asked, came = (take(x, places).index_select(1, heads).to(k.dtype) for x in (q, out))
            exact = softmax_rows(asked, k, keep=keep, scale=scale) @ v
            if skip is not None:
                came = came - _skip_at(v, skip[:, 0, :, 0].index_select(0, heads).to(v.dtype), places)
            shares = shares[:, None]
            sums = [torch.where(shares > 0, shares * x.square().sum(dim=-1), 0.0) for x in (came - exact, exact)]
            found = torch.stack([*sums, (shares > 0).expand_as(sums[0])]).sum(dim=(1, 3))
            found = torch.where(found.isfinite().all(dim=0), found, 0.0)
            self._sums.mul_(0.5 ** (passed / HALF_LIFE)).index_add_(1, heads, found.to(self._sums.dtype))
            self._step.add_(passed)

    def extra_repr(self) -> str:
        """The half-life, shown by print."""
        return f"half_life={HALF_LIFE}"

    def _steps_since(self, q: Float[Tensor, "b h n d"]) -> int:
        """Steps since the last sample if this step is sampled; else 0."""
        b, h, n, d = q.shape
        self._passed += 1
        if self._begun and self._passed < min(_APART, _WORTH // (b * n * (h * d) ** 2)):
            return 0
        passed, self._passed, self._begun = self._passed, 0, True
        return passed

    def _sample(
        self, q: Float[Tensor, "b h n d"], query_keep: Bool[Tensor, "b n"] | None
    ) -> tuple[Int[Tensor, "b r"], Float[Tensor, "b r"]]:
        """Positions of the sampled queries, and how many each stands for; 0 where a short sequence has no more."""
        stretch = torch.arange(QUERIES, device=q.device)
        at = (self._step * _OF_STEP + stretch * _OF_STRETCH) % _UNIT + stretch * _UNIT
        if query_keep is None:
            n = q.shape[2]
            places = at * n // (QUERIES * _UNIT) if n > QUERIES else stretch.clamp(max=n - 1)
            shares = torch.where(stretch < n, max(n / QUERIES, 1.0), 0.0)
            return places.expand(q.shape[0], -1), shares.expand(q.shape[0], -1)
        rank, count = ranks(query_keep)
        count = count[:, None]
        wanted = torch.where(count > QUERIES, at * count // (QUERIES * _UNIT), stretch)
        shares = torch.where(wanted < count, (count / QUERIES).clamp(min=1), 0.0)
        # Ranks never decrease, so the position of a rank is its insertion point.
        return torch.searchsorted(rank, wanted).clamp(max=q.shape[2] - 1), shares

    def _check_place(self) -> None:
        if torch.compiler.is_exporting():
            where = "torch.export"
        elif not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            where = "torch.func"
        elif getattr(self, "_is_replica", False):
            where = "nn.DataParallel, which discards its replicas (DistributedDataParallel works)"
        else:
            return
        raise ValueError(
            f"track_error is True in training inside {where}, which cannot keep the running sums: call model.eval(), "
            "or build the layer with track_error=False."
        )


def tracked_errors(model: nn.Module) -> dict[str, Float[Tensor, " h"]]:
    """The running estimate of each layer of a model that was built with `track_error`, by the layer's name.

    Args:
        model: A model of `nystrom.models`, or any Module that holds `nystrom.MultiheadAttention`.

    Returns:
        The relative error of each head, on the CPU; NaN before its first sample.

    Raises:
        ValueError: No layer has an estimate.
    """
    found = {
        name.rpartition(".")[0]: module.value().cpu()
        for name, module in model.named_modules()
        if isinstance(module, TrackedError)
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no layer that tracks its error: build it with track_error=True (in "
            "nystrom.MultiheadAttention, NystromAttention or EncoderConfig)."
        )
    return found


def _skip_at(
    v: Float[Tensor, "b g s e"], kernel: Float[Tensor, "g taps"], places: Int[Tensor, "b r"]
) -> Float[Tensor, "b g r e"]:
    """The skip convolution at some positions only; padding values must be zero."""
    taps = kernel.shape[1]
    around = places[:, :, None] + torch.arange(taps, device=v.device) - taps // 2
    inside = (around >= 0) & (around < v.shape[2])
    values = take(v, around.clamp(0, v.shape[2] - 1).flatten(1)).unflatten(2, (-1, taps))
    return (torch.where(inside[:, None, :, :, None], values, 0.0) * kernel[:, None, :, None]).sum(dim=3)
