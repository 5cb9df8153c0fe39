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

Claims of this library, and the rules that decide them:

- near_far and nystrom are nearer to exact attention along the curve than in the order of the file: for each, the mean
  over heads and slides of the difference of the errors is above zero by more than two of its standard errors.
- A model learns more along the curve than in shuffled order: the difference of the mean accuracies is more than two of
  its standard errors over seeds. It learns no less than in the order of the file: its mean accuracy is not below by
  more than two standard errors.
- From 10,000 tiles on `NystromAttention` takes less time than `nn.MultiheadAttention`, and no more than the package,
  forward and in training. The quartiles of the ratios within a turn decide; if 1 lies between them, the rows cannot
  tell.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
from nystrom.clock import peak_bytes, seconds
from nystrom.tiles import hilbert_order
from nystrom.turns import in_turns
from nystrom_lab.measure.rows import Row, cpu_name, new_row
from nystrom_lab.measure.timing import timed_rows
from nystrom_lab.report.plots.lines import draw_lines
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.fidelity.passes import PASSES, all_hold, is_at_most
from nystrom_lab.studies.reproduce.spread import spread_row
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study, beside_none

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEATURES, KINDS, TUMOUR_TILES = 1024, 6, 16
FILE, CURVE, SHUFFLED = "file", "Hilbert curve", "shuffled"
ORDERS = (FILE, CURVE, SHUFFLED)
ERROR, CLOSER, ACCURACY, MEMORY = "relative error of the output", "error - on the curve", "test accuracy", "memory"
OURS, NEAR_FAR, PACKAGE, TORCH = "NystromAttention", "near_far", "nystrom-attention", "nn.MultiheadAttention"
LIMIT, ROUNDS = 120.0, 3
_CPU = torch.device("cpu")


class SlideSizes(NamedTuple):
    """How much is measured.

    Attributes:
        side: Tiles along a side of the grid, for errors.
        slides: Slides, for errors.
        bags: Bags of a training, and as many again to test on.
        small: Tiles along a side of the grid, for learning.
        epochs: Passes over the bags.
        seeds: Trainings in each order.
        lengths: Tiles of a bag, for costs.
    """

    side: int
    slides: int
    bags: int
    small: int
    epochs: int
    seeds: int
    lengths: tuple[int, ...]


SMALL = SlideSizes(64, 4, 256, 24, 24, 3, (1_000, 10_000, 100_000))
PAPER = SMALL._replace(slides=16, bags=1024, seeds=5)


def _plan(setting: Setting) -> Plan:
    sizes = PAPER if setting.size == "paper" else SMALL
    parts = [
        Part("errors", partial(_measure_errors, sizes)),
        *(Part(f"learning-seed{seed}", partial(_measure_learning, sizes, seed)) for seed in range(sizes.seeds)),
        *(Part(f"costs-n={n}", partial(_measure_costs, n)) for n in sizes.lengths),
    ]
    said = {name: str(value) for name, value in sizes._asdict().items()}
    return Plan(parts, said, beside_none(setting, "fewer slides and shorter trainings"))


class Slide(NamedTuple):
    """A synthetic slide, its tiles in the order of a file.

    Attributes:
        features: The features of each tile.
        place: x and y of each tile.
        tumour: Which tiles are tumour.
    """

    features: Float[Tensor, "n features"]
    place: Int[Tensor, "n 2"]
    tumour: Tensor


def draw_slide(side: int, g: torch.Generator, *, together: bool, share: float = 0.6) -> Slide:
    """A slide with tissue on about `share` of a grid, and some tumour, in one place or scattered.

    Args:
        side: Tiles along a side of the grid.
        g: Source of the draw.
        together: Whether the tumour is in one place.
        share: Share of the grid that is tissue.
    """
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
    NEAR_FAR: lambda q, k, v: near_far_attention(q, k, v, **near_far_sizes(q.shape[2])),
    "nystrom-256": partial(nystrom_attention, num_landmarks=256),
}


@torch.no_grad()
def _measure_errors(sizes: SlideSizes, folder: Path) -> Iterable[Row]:
    del folder
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
                off = (attend(q, k, v) - exact).flatten(2).norm(dim=2) / exact.flatten(2).norm(dim=2)
                errors.setdefault((method, name), []).append(off)
    shared: dict[str, Any] = {"n": sizes.side**2, "seed": 0}
    for (method, name), values in errors.items():
        yield spread_row(ERROR, method, torch.stack(values), facts={"order": name, "h": 8, "d": 64}, **shared)
        if name != CURVE:
            apart = (torch.stack(values) - torch.stack(errors[method, CURVE])).double().flatten()
            yield _difference_row(CLOSER, method, apart, facts={"order": name}, **shared)


def _difference_row(quantity: str, method: str, values: Tensor, **shared: Any) -> Row:
    """A mean, with two of its standard errors on either side."""
    mean, error = values.mean().item(), 2 * values.std().item() / math.sqrt(len(values))
    return new_row(
        study="", quantity=quantity, method=method, value=mean, low=mean - error, high=mean + error,
        repeats=len(values), unit="", device=cpu_name(), **shared,
    )  # fmt: skip


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


def _measure_learning(sizes: SlideSizes, seed: int, folder: Path) -> Iterable[Row]:
    del folder
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
        yield new_row(
            study="", quantity=ACCURACY, method=OURS, value=torch.cat(right).double().mean().item(), unit="",
            repeats=len(test), facts=facts, seed=seed, device=cpu_name(),
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
    near = MultiheadAttention(512, 8, method="near_far", **near_far_sizes(n))
    layers: dict[str, Callable[[Tensor], Tensor]] = {
        OURS: lambda x: ours(x)[0],
        NEAR_FAR: lambda x: near(x)[0],
        TORCH: lambda x: torchs(x, x, x, need_weights=False)[0],
    }
    if find_spec("nystrom_attention") is not None:
        from nystrom_attention import NystromAttention as Package

        layers[PACKAGE] = Package(dim=512, dim_head=64, heads=8, num_landmarks=256, pinv_iterations=6, residual=True)
    return layers


def _measure_costs(n: int, folder: Path) -> Iterable[Row]:
    del folder
    layers, x = _layers(n), torch.randn(1, n, 512)

    def forward(layer: Callable[[Tensor], Tensor]) -> None:
        with torch.no_grad():
            layer(x)

    def both(layer: Callable[[Tensor], Tensor]) -> None:
        layer(x).sum().backward()

    shared: dict[str, Any] = {
        "n": n, "facts": {"b": 1, "h": 8, "d": 64, "threads": torch.get_num_threads()}, "device": cpu_name(),
    }  # fmt: skip
    for run, time in zip((forward, both), PASSES.values(), strict=True):
        clocks = {name: partial(seconds, partial(run, layer), _CPU) for name, layer in layers.items()}
        for name in layers:
            # Estimated from a tenth of the tiles: ten times the time, or a hundred times for exact attention.
            a_tenth = torch.randn(1, n // 10, 512)
            short = seconds(partial(_on, layers[name], a_tenth, run is both), _CPU)
            wanted = short * (100 if name == TORCH else 10)
            if wanted > LIMIT:
                del clocks[name]
                note = f"would take about {wanted:.0f} s, the limit is {LIMIT:.0f} s"
                yield new_row(study="", quantity=time, method=name, value=math.nan, unit="ms", note=note, **shared)
        taken = in_turns(clocks, ROUNDS)
        for name, each in taken.items():
            yield from timed_rows(name, each, taken[OURS], (time, f"{time} / {OURS}"), **shared)
            memory = peak_bytes(partial(run, layers[name]), _CPU) / 1e6
            yield new_row(
                study="", quantity=f"{time.partition(' ')[0]} {MEMORY}", method=name, value=memory, unit="MB", **shared
            )


def _on(layer: Callable[[Tensor], Tensor], x: Tensor, trains: bool) -> None:
    with torch.set_grad_enabled(trains):
        out = layer(x).sum()
    if trains:
        out.backward()


# What the rows say.


def _of(rows: Sequence[Row], quantity: str) -> list[Row]:
    return [row for row in rows if row.quantity == quantity]


def _tables(rows: Sequence[Row]) -> Sequence[Table]:
    errors = {(row.method, row.fact("order")): row for row in _of(rows, ERROR)}
    accuracy = {name: [row for row in _of(rows, ACCURACY) if row.fact("order") == name] for name in ORDERS}
    lines = [
        [f"error of {method}", *(_cell(errors.get((method, name)), ".3f") for name in ORDERS)] for method in _METHODS
    ]
    lines.append(
        [
            "test accuracy",
            *(f"{sum(row.value for row in found) / len(found):.1%}" if found else "" for found in accuracy.values()),
        ]
    )
    lengths = sorted({row.n for row in rows if row.n and row.quantity in PASSES.values()})
    costs = {(row.quantity, row.method, row.n): row for row in rows}
    names = [name for name in (OURS, NEAR_FAR, PACKAGE, TORCH) if any(key[1] == name for key in costs)]
    return [
        Table("by the order of the tiles", ["", *ORDERS], lines),
        Table(
            "one layer: ms / MB",
            ["", "", *(f"n = {n:,}" for n in lengths)],
            [
                [
                    name,
                    time.partition(" ")[0],
                    *(
                        " / ".join(
                            _cell(costs.get((quantity, name, n)), ",.0f")
                            for quantity in (time, f"{time.partition(' ')[0]} {MEMORY}")
                        )
                        for n in lengths
                    ),
                ]
                for name in names
                for time in PASSES.values()
            ],
            2,
        ),
    ]


def _cell(row: Row | None, digits: str) -> str:
    return "not measured" if row is None or math.isnan(row.value) else format(row.value, digits)


def _verdicts(rows: Sequence[Row]) -> Sequence[Verdict]:
    verdicts = []
    for method in _METHODS:
        found = [row for row in _of(rows, CLOSER) if (row.method, row.fact("order")) == (method, FILE)]
        agrees, said = None, "Not measured."
        for row in found:
            assert row.low is not None
            assert row.high is not None
            agrees = True if row.low > 0 else False if row.high < 0 else None
            said = f"The error is {row.value:.4f} larger in the file's order, {row.low:.4f} to {row.high:.4f}."
        verdicts.append(Verdict(f"{method} is nearer to exact attention along a Hilbert curve.", agrees, said))
    accuracy = {name: [row for row in _of(rows, ACCURACY) if row.fact("order") == name] for name in ORDERS}
    agrees, said = None, "Not measured."
    if all(len(found) > 1 for found in accuracy.values()):
        of = {name: torch.tensor([row.value for row in found]).double() for name, found in accuracy.items()}
        said = "; ".join(f"{name}: {', '.join(f'{share:.1%}' for share in shares)}" for name, shares in of.items())
        said = f"Each seed: {said}."
        apart = {name: _apart(of[CURVE], of[name]) for name in (FILE, SHUFFLED)}
        more = True if apart[SHUFFLED] > 2 else False if apart[SHUFFLED] < -2 else None
        agrees = all_hold([more, apart[FILE] >= -2])
    verdicts.append(
        Verdict(
            "A model learns more along the curve than in shuffled order, and no less than in a file's.", agrees, said
        )
    )
    for other, claim in ((TORCH, "less time than nn.MultiheadAttention"), (PACKAGE, "no more time than the package")):
        found = [
            row
            for time in PASSES.values()
            for row in _of(rows, f"{time} / {OURS}")
            if row.method == other and (row.n or 0) >= 10_000
        ]
        # The ratio is the other's to ours.
        decided = [_is_more(row) for row in found]
        said = "; ".join(f"n = {row.n:,}, {row.quantity.partition(' ')[0]}: {row.value:.2f} times" for row in found)
        verdicts.append(
            Verdict(
                f"From 10,000 tiles on NystromAttention takes {claim}.", all_hold(decided), f"{said or 'Not measured'}."
            )
        )
    return verdicts


def _is_more(row: Row) -> bool | None:
    """Whether both quartiles of a ratio are above 1; False where both are at most 1, None where 1 is between them."""
    less = is_at_most(row, 1)
    return None if less is None else not less


def _apart(ours: Tensor, others: Tensor) -> float:
    """By how many standard errors over seeds the mean of our shares is above that of the others."""
    error = math.sqrt(ours.var().item() / len(ours) + others.var().item() / len(others))
    more = (ours.mean() - others.mean()).item()
    return more / error if error else math.copysign(math.inf, more) if more else 0.0


def _figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    panels = {time: [row for row in _of(rows, time) if not math.isnan(row.value)] for time in PASSES.values()}
    figure = draw_lines(
        panels, over=lambda row: row.n, x_label="tiles n", y_label="ms", band="quartiles", line="medians"
    )
    return {"": figure}


STUDIES = {
    "slides": Study(
        shows="bags of tiles: the order of the tiles, and what a layer costs beside others",
        source="this library",
        trains=True,
        plan=_plan,
        tables=_tables,
        verdicts=_verdicts,
        figures=_figures,
    )
}
