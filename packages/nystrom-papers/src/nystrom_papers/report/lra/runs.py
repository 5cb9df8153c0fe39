"""Runs of the Long Range Arena as their rows describe them, and their accuracies over seeds.

A run is the rows of one study, method with its size, preset with what was changed of it, and seed. Runs that differ in
the seed alone make a cell; a mean over different settings would say nothing, so it raises an error.

Rows of Linformer say whether its projections were trained. Rows that do not say it are older: at their time the design
"authors", that of both papers' presets, froze one projection for all layers. They are shown as a change of today's
presets, which follow each paper's code.
"""

import math
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nystrom_lab.measure.rows import Row

FIRST_OPERATOR = "first operator of test"
# Facts of a run's rows that follow from its preset and the changes to it.
PROJECTIONS = "projections"
OF_MODEL = ("layers", "width", "heads", PROJECTIONS)


@dataclass(frozen=True)
class Line:
    """The method and preset of a line of the table.

    Attributes:
        method: Name in the rows, with its size and skip, such as "nystrom-64+skip".
        preset: Name of the preset, followed by its changes, such as "demo, learning_rate=0.001"; "" if the rows do not
            say.
    """

    method: str
    preset: str

    @property
    def base(self) -> str:
        """The registry's name of the method."""
        return re.split(r"[-+]", self.method, maxsplit=1)[0]


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of one method on one task, in percent.

    Attributes:
        mean: Mean over the seeds.
        deviation: Standard deviation over the seeds; None for a single seed.
        seeds: Number of seeds.
        error: Binomial standard error of a single run: how far another draw of as many test samples would move it.
        samples: Test samples.
        steps: Training steps; None where the rows do not say.
        positions: Positions of the model; None where the rows do not say.
    """

    mean: float
    deviation: float | None
    seeds: int
    error: float
    samples: int
    steps: int | None
    positions: int | None


# The rows of some seeds, by quantity and seed.
Seeds = Mapping[str, Mapping[int | None, Row]]


def runs_by_cell(rows: Iterable[Row], quantities: Collection[str]) -> Mapping[tuple[Line, str], Seeds]:
    """The rows of trainings by line and task, quantity and seed, in their order.

    Raises:
        ValueError: A number that is not finite, or two different runs of one seed.
    """
    cells: dict[tuple[Line, str], dict[str, dict[int | None, Row]]] = {}
    for row in rows:
        if not row.study.startswith("train ") or row.quantity not in quantities:
            continue
        line, task = line_of(row), row.study.removeprefix("train ")
        if not math.isfinite(row.value):
            # A mean over seeds has no place for it.
            raise ValueError(
                f"{row.quantity} of {row.method} on {task} with seed {row.seed} is {row.value} ({row.note}): take the "
                "rows of this run out, or train it again."
            )
        before = cells.setdefault((line, task), {}).setdefault(row.quantity, {}).setdefault(row.seed, row)
        if (before.value, before.n) != (row.value, row.n):
            raise ValueError(
                f"rows hold two runs of {line.method} ({line.preset}) on {task} with seed {row.seed}, one with "
                f"{row.quantity} {before.value:g} and one with {row.value:g}: tabulate them separately."
            )
    return cells


def check_alike(line: Line, task: str, settings: Mapping[str, Iterable[object]]) -> None:
    """Raise ValueError if the runs of a cell differ in a setting, of which the values are given by its name."""
    for what, values in settings.items():
        if len(different := dict.fromkeys(values)) > 1:
            raise ValueError(
                f"runs of {line.method} ({line.preset}) on {task} differ in {what}: {', '.join(map(str, different))}; "
                "a mean over seeds needs the same settings: tabulate them separately."
            )


def lra_cells(rows: Sequence[Row]) -> dict[Line, dict[str, Accuracy]]:
    """Cells of the table by line and task, in the order of the rows: accuracy on the test split, and the steps.

    Raises:
        ValueError: No accuracy on a test split, one that is not a finite number, two different runs of one seed, or
            seeds with different settings.
    """
    cells: dict[Line, dict[str, Accuracy]] = {}
    for (line, task), by_quantity in runs_by_cell(rows, ("test accuracy", "steps")).items():
        tested = by_quantity.get("test accuracy", {})
        if not tested:
            continue
        trained = by_quantity.get("steps", {})
        steps = [int(trained[seed].value) if seed in trained else None for seed in tested]
        of = list(tested.values())
        settings = {"steps": steps, "positions": [row.n for row in of], "test samples": [row.repeats for row in of]}
        check_alike(line, task, settings | {"dtype": [row.dtype for row in of]})
        shares = [row.value for row in of]
        mean = statistics.fmean(shares)
        cells.setdefault(line, {})[task] = Accuracy(
            mean=100 * mean,
            deviation=100 * statistics.stdev(shares) if len(shares) > 1 else None,
            seeds=len(shares),
            error=100 * math.sqrt(mean * (1 - mean) / of[0].repeats),
            samples=of[0].repeats,
            steps=steps[0],
            positions=of[0].n,
        )
    if not cells:
        raise ValueError(
            "rows hold no accuracy on a test split; expected rows of `nystrom lra run` or `nystrom train`."
        )
    return cells


def lra_guesses(rows: Sequence[Row]) -> list[str]:
    """A sentence about a baseline without a model on ListOps' test samples, for each set of them."""
    shares = dict.fromkeys(row.value for row in rows if row.quantity == FIRST_OPERATOR)
    return [
        f"listops: the first operator of an expression alone tells {100 * share:.1f} % of the test samples."
        for share in shares
    ]


def line_of(row: Row) -> Line:
    """The line of the table that a row belongs to."""
    facts = dict(row.facts) | ({} if (before := _before(row)) is None else {before.change: "True"})
    changes = [f"{name}={value}" for name, value in sorted(facts.items()) if name not in ("preset", *OF_MODEL)]
    return Line(row.method, ", ".join([facts["preset"], *changes]) if "preset" in facts else "")


def lra_departures(rows: Sequence[Row]) -> list[str]:
    """How older rows that do not say it differ from today's presets, a sentence for each line."""
    departures = {line_of(row): before.says for row in rows if (before := _before(row)) is not None}
    return [f"{line.method} ({line.preset}): {says}" for line, says in departures.items()]


class _Before(NamedTuple):
    """An earlier setting, as a change of today's preset and in words."""

    change: str
    says: str


_FROZEN = _Before(
    "options.frozen",
    "measured when the preset froze the projection. Nyströmformer's code trains it, and so does the preset now: its "
    "command measures this again with --options.frozen True.",
)
_SHARED = _Before(
    "share_projections",
    "measured when the layers of the preset shared one projection. Skyformer's code has one in each, and so has the "
    "preset now: no command measures this again.",
)


def _before(row: Row) -> _Before | None:
    """The earlier setting of Linformer's projections in a row that does not say it; None if it is today's."""
    preset = row.fact("preset")
    of_skyformer = preset.startswith("skyformer")
    design = row.fact("design") or ("authors" if of_skyformer or preset.startswith("nystromformer") else "")
    if not row.method.startswith("linformer") or row.fact(PROJECTIONS) or design != "authors":
        return None
    return _SHARED if of_skyformer else _FROZEN
