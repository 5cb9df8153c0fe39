r"""Pathology slides as bags of tiles: the order of the tiles, and the cost of a layer compared with others.

A synthetic slide is a piece of tissue on a grid of tiles. Each tile has 1,024 features, the sum of three parts: the
kind of tissue, which changes smoothly over the slide; noise; and tumour, in some tiles. Tiles come in three orders:
that of a file, row after row; along a Hilbert curve (`nystrom.hilbert_order`); and shuffled.

- Errors: the relative error of a layer's attention in each order, $\|\tilde Y - Y\|_F / \|Y\|_F$ of a head against
  exact attention. Measured are near_far with sizes for the length, and nystrom with 256 landmarks, on slides of 4,096
  tiles. Queries, keys and values are random projections, scaled so that attention is about as peaked as in trained
  models (the entropy of the weights is some 4 bits below that of even ones).
- Learning: a bag is positive if its tumour tiles are in one place, and negative if as many are scattered. The model has
  a class token, two layers of `NystromAttention` with the skip, and a head. Rows hold its accuracy on new slides after
  a short training.
- Costs of one layer of width 512 with 8 heads, batch 1, forward and in training: `NystromAttention` with 256 landmarks
  and the skip; near_far with sizes for the length; the package nystrom-attention with the same landmarks and skip; and
  `nn.MultiheadAttention`. A call that would take longer than two minutes, estimated from one with a tenth of the tiles,
  is not timed.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from nystrom.attention.heads import split_heads
from nystrom.attention.layer import MultiheadAttention, NystromAttention
from nystrom.attention.methods.near_far import near_far_attention
from nystrom.attention.methods.nystrom import nystrom_attention
from nystrom.attention.methods.softmax import softmax_attention
from nystrom.attention.options import near_far_sizes
from nystrom.clock import seconds
from nystrom.tiles import hilbert_order
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.table import Table
from nystrom_papers.studies.fidelity.beside_exact import ERROR, PASSES, both, forward, relative_error, time_calls
from nystrom_papers.studies.reproduce.declared import Answer, Claim, Lines, by, declare, each, only
from nystrom_papers.studies.reproduce.known import error_over, estimate, holds_for_share, quartiles_of
from nystrom_papers.studies.reproduce.spread import difference_row, spread_row
from nystrom_papers.studies.reproduce.study import Plan, Setting, beside_none, part

FEATURES, KINDS, TUMOUR_TILES = 1024, 6, 16
FILE, CURVE, SHUFFLED = "file", "Hilbert curve", "shuffled"
ORDERS = (FILE, CURVE, SHUFFLED)
CLOSER, ACCURACY, MEMORY = "error - on the curve", "test accuracy", "memory"
OURS, NEAR_FAR, PACKAGE, TORCH = "NystromAttention", "near_far", "nystrom-attention", "nn.MultiheadAttention"
LIMIT, ROUNDS = 120.0, 3


class SlideSizes(NamedTuple):
    """How much is measured."""

    # For errors: tiles along a side of the grid, and slides.
    side: int
    slides: int
    # For learning: bags of a training, and as many again to test on; tiles along a side; passes; trainings in an order.
    bags: int
    small: int
    epochs: int
    seeds: int
    # For costs: tiles of a bag.
    lengths: tuple[int, ...]


SMALL = SlideSizes(64, 4, 256, 24, 24, 3, (1_000, 10_000, 100_000))
PAPER = SMALL._replace(slides=16, bags=1024, seeds=5)


def _plan(setting: Setting) -> Plan:
    sizes = PAPER if setting.size == "paper" else SMALL
    parts = [
        part("errors", _measure_errors, sizes),
        *(part(f"learning-seed{seed}", _measure_learning, sizes, seed) for seed in range(sizes.seeds)),
        *(part(f"costs-n={n}", _measure_costs, n) for n in sizes.lengths),
    ]
    # Lengths as a tuple: so the settings of measured rows have them.
    said = {name: str(value) for name, value in sizes._asdict().items()}
    return Plan(parts, said, beside_none(setting, "fewer slides and shorter trainings"))


class Slide(NamedTuple):
    """A synthetic slide, its tiles in the order of a file: what they show, where they are, and which are tumour."""

    features: Float[Tensor, "n features"]
    place: Int[Tensor, "n 2"]
    tumour: Tensor


def draw_slide(side: int, g: torch.Generator, *, together: bool, share: float = 0.6) -> Slide:
    """A slide with tissue on about `share` of a grid, and some tumour, in one place or scattered."""
    kinds = torch.randn(KINDS, FEATURES, generator=torch.Generator().manual_seed(0))
    tumour_of = torch.randn(FEATURES, generator=torch.Generator().manual_seed(1))
    fields = torch.randn(1, KINDS + 1, 2 + side // 6, 2 + side // 6, generator=g)
    smooth = F.interpolate(fields, size=(side, side), mode="bicubic", align_corners=True)[0]
    place = (smooth[-1] >= smooth[-1].flatten().quantile(1 - share)).nonzero().flip(1)
    kind = 4 * smooth[:-1, place[:, 1], place[:, 0]].T
    seed = place[torch.randint(len(place), (1,), generator=g)]
    apart = (place - seed).square().sum(dim=1).double() if together else torch.rand(len(place), generator=g)
    tumour = torch.zeros(len(place), dtype=torch.bool)
    tumour[apart.topk(TUMOUR_TILES, largest=False).indices] = True
    noise = torch.randn(len(place), FEATURES, generator=g)
    features = kind.softmax(dim=1) @ kinds + 0.5 * noise + 0.5 * tumour[:, None] * tumour_of
    return Slide(features, place, tumour)


def order_of(slide: Slide, name: str, g: torch.Generator) -> Int[Tensor, " n"]:
    """The tiles in one of `ORDERS`."""
    if name == SHUFFLED:
        return torch.randperm(len(slide.place), generator=g)
    return hilbert_order(slide.place) if name == CURVE else torch.arange(len(slide.place))


# Errors.

_METHODS: dict[str, Callable[..., Tensor]] = {
    NEAR_FAR: lambda q, k, v: near_far_attention(q, k, v, **near_far_sizes(q.shape[2], selects=False)),
    "nystrom-256": partial(nystrom_attention, num_landmarks=256),
}


@torch.no_grad()
def _measure_errors(sizes: SlideSizes) -> Iterable[Row]:
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(3 * 512, FEATURES, generator=g) / FEATURES**0.5
    errors: dict[tuple[str, str], list[Tensor]] = {}
    for _ in range(sizes.slides):
        slide = draw_slide(sizes.side, g, together=True, share=1.0)
        for name in ORDERS:
            x = slide.features[order_of(slide, name, g)]
            q, k, v = (split_heads(part[None], 8) for part in (x @ weight.T).chunk(3, dim=1))
            # Weights are then about as far from even as those of trained encoders.
            q = 3 * q
            exact = softmax_attention(q, k, v)
            for method, attend in _METHODS.items():
                errors.setdefault((method, name), []).append(relative_error(attend(q, k, v), exact))
    shared: dict[str, Any] = {"n": sizes.side**2, "seed": 0}
    for (method, name), values in errors.items():
        yield spread_row(ERROR, method, torch.stack(values), facts={"order": name, "h": 8, "d": 64}, **shared)
        if name != CURVE:
            apart = torch.stack(values) - torch.stack(errors[method, CURVE])
            yield difference_row(CLOSER, method, apart, facts={"order": name}, **shared)


# Learning.


class _BagClassifier(nn.Module):
    """A class token among the tiles, in two layers."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.tiles = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU())
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.layers = nn.ModuleList(NystromAttention(width, 4, num_landmarks=64) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor, ignore: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.tiles(x)], dim=1)
        ignore = F.pad(ignore, (1, 0))
        x = x + self.layers[0](self.norms[0](x), key_padding_mask=ignore)[0]
        x = x + self.mlp(self.norms[1](x))
        x = x + self.layers[1](self.norms[2](x), key_padding_mask=ignore)[0]
        return self.head(x[:, 0])[:, 0]


def _bags(sizes: SlideSizes, name: str, seed: int) -> list[tuple[Tensor, int]]:
    """The tiles of slides in an order, every second bag positive; a seed has the same slides in all orders."""
    g, shuffle = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    slides = [draw_slide(sizes.small, g, together=bool(place % 2)) for place in range(2 * sizes.bags)]
    return [(each.features[order_of(each, name, shuffle)], place % 2) for place, each in enumerate(slides)]


def _measure_learning(sizes: SlideSizes, seed: int) -> Iterable[Row]:
    for name in ORDERS:
        bags = _bags(sizes, name, 100 + seed)
        train, test = bags[: sizes.bags], bags[sizes.bags :]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, batch = _BagClassifier(), 8
            steps = sizes.epochs * math.ceil(len(train) / batch)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
            for _ in range(sizes.epochs):
                order = torch.randperm(len(train)).tolist()
                for start in range(0, len(train), batch):
                    x, ignore, labels = _batch([train[place] for place in order[start : start + batch]])
                    F.binary_cross_entropy_with_logits(model(x, ignore), labels).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
            with torch.no_grad():
                model.eval()
                right = []
                for start in range(0, len(test), batch):
                    x, ignore, labels = _batch(test[start : start + batch])
                    right.append((model(x, ignore) > 0) == (labels > 0))
        facts = {"order": name, "bags": len(train), "steps": steps}
        yield Row(
            quantity=ACCURACY, method=OURS, value=torch.cat(right).double().mean().item(), repeats=len(test),
            facts=facts, seed=seed,
        )  # fmt: skip


def _batch(bags: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    most = max(len(x) for x, _ in bags)
    x = torch.stack([F.pad(x, (0, 0, 0, most - len(x))) for x, _ in bags])
    ignore = torch.stack([torch.arange(most) >= len(x) for x, _ in bags])
    return x, ignore, torch.tensor([float(label) for _, label in bags])


# Costs.


def _layers(n: int) -> dict[str, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    ours, torchs = NystromAttention(512, 8, num_landmarks=256), nn.MultiheadAttention(512, 8, batch_first=True)
    near = MultiheadAttention(512, 8, method="near_far", **near_far_sizes(n, selects=False))
    layers: dict[str, Callable[[Tensor], Tensor]] = {
        OURS: lambda x: ours(x)[0],
        NEAR_FAR: lambda x: near(x)[0],
        TORCH: lambda x: torchs(x, x, x, need_weights=False)[0],
    }
    if find_spec("nystrom_attention") is not None:
        from nystrom_attention import NystromAttention as Package

        layers[PACKAGE] = Package(dim=512, dim_head=64, heads=8, num_landmarks=256, pinv_iterations=6, residual=True)
    return layers


def _measure_costs(n: int) -> Iterable[Row]:
    layers, x = _layers(n), torch.randn(1, n, 512)
    facts = {"b": 1, "h": 8, "d": 64, "threads": torch.get_num_threads()}
    for run, time in zip((forward, both), PASSES.values(), strict=True):
        calls = {name: partial(run, layer, x) for name, layer in layers.items()}
        for name, layer in layers.items():
            # Estimated from a tenth of the tiles: ten times the time, or a hundred times for exact attention.
            short = seconds(partial(run, layer, torch.randn(1, n // 10, 512)), torch.device("cpu"))
            wanted = short * (100 if name == TORCH else 10)
            if wanted > LIMIT:
                del calls[name]
                yield Row(
                    quantity=time, method=name, value=math.nan, unit="ms", n=n, facts=facts,
                    note=f"would take about {wanted:.0f} s, the limit is {LIMIT:.0f} s",
                )  # fmt: skip
        names = (time, f"{time} / {OURS}")
        memory = f"{time.partition(' ')[0]} {MEMORY}"
        yield from time_calls(calls, ROUNDS, beside=OURS, quantities=names, memory=memory, n=n, facts=facts)


# Claims on the rows.


def _nearer(method: str, rows: pd.DataFrame) -> Answer:
    row = only(rows, CLOSER, method=method, order=FILE)
    said = f"The error is {row.value:.4f} larger in the file's order, {row.low:.4f} to {row.high:.4f}."
    return quartiles_of(row).above(0), said


def _learns_more(rows: pd.DataFrame) -> Answer:
    """More than two standard errors over seeds above shuffled order, and not as far below a file's."""
    of = {name: [row.value for row in each(rows, ACCURACY, order=name)] for name in ORDERS}
    if any(len(shares) < 2 for shares in of.values()):
        return None, "Not measured."
    said = "; ".join(f"{name}: {', '.join(f'{share:.1%}' for share in shares)}" for name, shares in of.items())
    file, shuffled = (
        estimate(fmean(of[CURVE]) - fmean(of[name]), math.hypot(error_over(of[CURVE]), error_over(of[name])))
        for name in (FILE, SHUFFLED)
    )
    return holds_for_share([shuffled.above(0), file.high >= 0]), f"Each seed: {said}."


def _less_time(other: str, rows: pd.DataFrame) -> Answer:
    """From 10,000 tiles on; the ratio is the other's to ours."""
    ratios = [
        row for time in PASSES.values() for row in each(rows, f"{time} / {OURS}", method=other) if row.n >= 10_000
    ]
    said = "; ".join(f"n = {row.n:,}, {row.quantity.partition(' ')[0]}: {row.value:.2f} times" for row in ratios)
    return holds_for_share(quartiles_of(row).above() for row in ratios), f"{said or 'Not measured'}."


def _by_order(rows: pd.DataFrame) -> list[Table]:
    errors = by(rows, ERROR, "method", "order")
    lines = [[f"error of {name}", *(_cell(errors.get((name, order)), ".3f") for order in ORDERS)] for name in _METHODS]
    shares = [[row.value for row in each(rows, ACCURACY, order=name)] for name in ORDERS]
    lines.append(["test accuracy", *(f"{sum(of) / len(of):.1%}" if of else "" for of in shares)])
    return [Table("by the order of the tiles", ["", *ORDERS], lines)]


def _costs(rows: pd.DataFrame) -> list[Table]:
    cells = by(rows, None, "quantity", "method", "n")
    lengths = sorted({n for quantity, _, n in cells if quantity in _PASSES})
    lines = [
        [
            name,
            what,
            *(
                " / ".join(_cell(cells.get((quantity, name, n)), ",.0f") for quantity in (time, f"{what} {MEMORY}"))
                for n in lengths
            ),
        ]
        for name in (OURS, NEAR_FAR, PACKAGE, TORCH)
        if any(name == method for _, method, _ in cells)
        for time, what in _PASSES.items()
    ]
    return [Table("one layer: ms / MB", ["", "", *(f"n = {n:,}" for n in lengths)], lines, 2)]


def _cell(row: Any, digits: str) -> str:
    return "not measured" if row is None or math.isnan(row.value) else format(row.value, digits)


_PASSES = {time: time.partition(" ")[0] for time in PASSES.values()}

STUDIES = {
    "slides": declare(
        shows="bags of tiles: the order of the tiles, and what a layer costs beside others",
        source="this library",
        trains=True,
        plan=_plan,
        tables=[_by_order, _costs],
        claims=[
            *(
                Claim(f"{method} is nearer to exact attention along a Hilbert curve.", partial(_nearer, method))
                for method in _METHODS
            ),
            Claim(
                "A model learns more along the curve than in shuffled order, and no less than in a file's.",
                _learns_more,
            ),
            *(
                Claim(f"From 10,000 tiles on NystromAttention takes {claim}.", partial(_less_time, other))
                for other, claim in (
                    (TORCH, "less time than nn.MultiheadAttention"), (PACKAGE, "no more time than the package")
                )
            ),
        ],
        figures={
            "": Lines(
                of={"quantity": [*_PASSES]}, over="n", panel="{quantity}", x_label="tiles n", y_label="ms",
                band="quartiles", options={"line": "medians"},
            )
        },
    )
}  # fmt: skip
