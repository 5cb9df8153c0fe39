"""The results of an inspection in words: for which layers a method works, and what to change at what cost.

The mean relative error of a layer's heads is small up to a tenth, and large above three tenths; these are rules of
thumb. The error of the hidden states after the last layer decides, and the share of predictions that change. Times are
medians over turns. If the advice depends on which of two methods is faster, and the turns leave that open, the text
says so instead (`nystrom.interleaved_timing`).
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from textwrap import TextWrapper
from typing import Any

from nystrom.checks import ranges
from nystrom.interleaved_timing import Quartiles, is_open, too_busy
from nystrom_lab.measure.rows import Row

# Quantities of the rows of the study "inspect".
ERROR, VARIATION, RESIDUAL = "output error", "total variation of the rows", "residual of the inverse"
ENTROPY, DISTANCE, NEAR, RANK = "entropy", "distance", "weight within 32 tokens", "effective rank"
HIDDEN, CHANGED, TIME = "hidden error", "changed predictions", "attention time"
RATIO = "attention time / another's"
HIDDEN_HELD_OUT = "held-out hidden error"

# Small and large errors; NaN, from a method whose output is not finite, counts as large.
SMALL, LARGE = 0.1, 0.3
# Columns of the terminal, those for the methods of a table of layers, and those for a list of layers.
_COLUMNS, _ACROSS, _LIST = 80, 75, 24
_BULLET = TextWrapper(_COLUMNS, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def layer_and_head(row: Row) -> tuple[int, int]:
    """The layer and the head of a row."""
    return int(row.facts["layer"]), int(row.facts["head"])


def layer_errors(rows: Sequence[Row]) -> dict[str, dict[int, tuple[float, float, float]]]:
    """The mean error of the heads by method and layer, with the means of the ends of their intervals."""
    heads: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        if row.quantity == ERROR:
            heads.setdefault(row.method, {}).setdefault(layer_and_head(row)[0], []).append(row)
    return {
        method: {
            layer: (
                _mean([row.value for row in those]),
                _mean([math.nan if row.low is None else row.low for row in those]),
                _mean([math.nan if row.high is None else row.high for row in those]),
            )
            for layer, those in layers.items()
        }
        for method, layers in heads.items()
    }


def inspection_text(rows: Sequence[Row], *, model: str) -> str:
    """The verdict on a model by the rows of one inspection, at most 80 columns wide.

    Raises:
        ValueError: The rows hold no method.
    """
    errors = layer_errors(rows)
    if not errors:
        raise ValueError("rows hold no errors of layers; expected those of an inspection of one method at least.")
    any_row = next(row for row in rows if row.quantity == ERROR)
    layers = list(next(iter(errors.values())))
    heads = 1 + max(layer_and_head(row)[1] for row in rows if row.quantity == ERROR)
    sampled = any_row.facts["r"]
    texts = "text" if any_row.repeats == 1 else "texts"
    lines = [
        model,
        f"{any_row.repeats} {texts} of {any_row.n} tokens, {sampled} queries of each sampled; {len(layers)} "
        f"{'layer' if len(layers) == 1 else 'layers'} of {heads} {'head' if heads == 1 else 'heads'}",
        "",
    ]
    lines += _layer_tables(rows, errors)
    lines += _method_table(rows, errors)
    lines += ["", *_time_table(rows)]
    lines += ["", *_wrapped(_advice(rows, errors))]
    return "\n".join(lines) + "\n"


def plan_text(said: str, measured: Mapping[str, Any], *, file: Path) -> str:
    """A description of a plan for a budget, and how to use it, at most 80 columns wide.

    Args:
        said: The layers and their methods, in words.
    """
    mean, exact = measured["mean ms of a layer's attention"], measured["ms of a layer's attention"]["softmax"]
    changed = measured["changed predictions"]
    lost = "" if changed is None else f" and {changed:.1%} of the predictions change"
    low, high = measured["quartiles of the mean ms"]
    return "\n".join(
        _wrapped(
            [
                f"Within a budget of {measured['budget']:g}: {said}. The hidden states have a relative error of "
                f"{_short(measured['error'])}{_held_out(measured)}{lost}, at {mean:.2f} ms a layer on average "
                f"(quartiles {low:.2f} to {high:.2f}; {exact:.2f} with exact attention).",
                *_exact_heads(measured),
                *([f"{measured['too busy to tell']} The plan depends on it."] if measured["too busy to tell"] else []),
                f"{file.name} is taken by nystrom convert --plan, nystrom finetune --plan, and "
                "nystrom.integrations.set_attention(model, nystrom.attention.plan.read_plan(FILE)).",
            ]
        )
    )


def _held_out(measured: Mapping[str, Any]) -> str:
    error = measured["held-out error"]
    if error is None:
        return ""
    more = ", more than the budget: name more with --num-texts" if error > measured["budget"] else ""
    return f" ({_short(error)} on texts that it was not chosen by{more})"


def _exact_heads(measured: Mapping[str, Any]) -> list[str]:
    """The exact heads of a plan, by layer and head, and the error without them."""
    heads = ", ".join(f"{place} ({share:.0%})" for place, share in measured["exact heads"].items())
    without = measured["error without exact heads"]
    return [
        f"Exact heads, as layer.head, with the share of the squared error that each makes where all use the method: "
        f"{heads}. Without them the error is {_short(without)}."
    ] * bool(heads)


def _layer_tables(rows: Sequence[Row], errors: dict[str, dict[int, tuple[float, float, float]]]) -> list[str]:
    """Errors of layers, with half-widths of their intervals, next to properties of exact attention."""
    lines = ["Error of each layer's output, mean over heads (± half the interval at 95 %)"]
    groups: list[list[str]] = [[]]
    for name in errors:
        if groups[-1] and sum(_column(other) for other in (*groups[-1], name)) > _ACROSS:
            groups.append([])
        groups[-1].append(name)
    for group in groups:
        lines.append("layer" + "".join(f"{name:>{_column(name)}}" for name in group))
        for layer in errors[group[0]]:
            cells = []
            for name in group:
                value, low, high = errors[name][layer]
                cells.append(f"{f'{value:.3f} ±{(high - low) / 2:.3f}':>{_column(name)}}")
            lines.append(f"{layer:5}" + "".join(cells))
        lines.append("")
    lines.append("Exact attention, mean over heads")
    lines.append("layer  entropy (nats)  distance  within 32 tokens  effective rank")
    facts = {quantity: _by_layer(rows, quantity) for quantity in (ENTROPY, DISTANCE, NEAR, RANK)}
    for layer in facts[ENTROPY]:
        entropy, distance, near, rank = (facts[quantity][layer] for quantity in (ENTROPY, DISTANCE, NEAR, RANK))
        lines.append(f"{layer:5}  {entropy:14.2f}  {distance:8.0f}  {near:16.0%}  {rank:14.1f}")
    return [*lines, ""]


def _method_table(rows: Sequence[Row], errors: dict[str, dict[int, tuple[float, float, float]]]) -> list[str]:
    """A line for each method: the model's error, the time, the layers with small and with large errors; a plan has no
    time and no layers.
    """
    hidden, changed = (_by_method(rows, quantity) for quantity in (HIDDEN, CHANGED))
    ratios = {row.method: row for row in rows if row.quantity == RATIO and row.facts["beside"] == "softmax"}
    methods = list(dict.fromkeys((*errors, *hidden)))
    width = max(map(len, methods))
    lines = [
        "Hidden states after the last layer, time of attention over exact, and layers",
        f"{'':{width}}  hidden  changed   time  {f'error <= {SMALL}':{_LIST // 2}}  error > {LARGE}",
    ]
    for method in methods:
        layers = errors.get(method, {})
        small = _listed([layer for layer, error in layers.items() if error[0] <= SMALL]) if layers else "-"
        large = _listed([layer for layer, error in layers.items() if not error[0] <= LARGE]) if layers else "-"
        time = f"{ratios[method].value:.2f}" if layers else "-"
        cells = (_short(hidden.get(method)), "-" if method not in changed else f"{changed[method]:.1%}")
        lines.append(f"{method:{width}}  {cells[0]:>6}  {cells[1]:>7}  {time:>5}  {small:{_LIST // 2}}  {large}")
    return lines


def _time_table(rows: Sequence[Row]) -> list[str]:
    """A line for each method and exact attention: its time and the ratio to exact attention's, with quartiles."""
    times = [row for row in rows if row.quantity == TIME]
    ratios = {row.method: row for row in rows if row.quantity == RATIO and row.facts["beside"] == "softmax"}
    width = max(len(row.method) for row in times)
    cells = [
        (row.method, _spread(row), _spread(ratios[row.method]) if row.method in ratios else "1.00") for row in times
    ]
    column = max(len(time) for _, time, _ in cells)
    return [
        f"Time of a layer's attention, median of {_turns(rows)} turns (and quartiles)",
        f"{'':{width}}  {'ms':{column}}  over exact",
        *(f"{name:{width}}  {time:{column}}  {ratio}" for name, time, ratio in cells),
    ]


def _turns(rows: Sequence[Row]) -> int:
    return next(row.repeats for row in rows if row.quantity == TIME)


def _spread(row: Row) -> str:
    return f"{row.value:.2f} ({row.low:.2f} to {row.high:.2f})"


def _open_orders(rows: Sequence[Row], names: Sequence[str]) -> dict[tuple[str, str], Quartiles]:
    """The pairs of these methods for which the turns do not tell which is faster, and the ratios of their times."""
    ratios = {}
    for row in rows:
        if row.quantity == RATIO:
            assert row.low is not None, "ratios have quartiles"
            assert row.high is not None, "ratios have quartiles"
            ratios[row.method, row.facts["beside"]] = Quartiles(row.low, row.value, row.high)
    return {pair: ratios[pair] for pair in combinations(names, 2) if is_open(ratios[pair])}


def _cost(time: float, first: str, times: Mapping[str, float], *, told: bool) -> str:
    """The cost of an alternative, and whether exact attention in all layers would cost less, if the turns told that."""
    slower = ", slower than exact attention here" if told and time > times["softmax"] else ""
    return f"at {time / times[first]:.2f} times the time of {first}{slower}"


def _listed(layers: Sequence[int]) -> str:
    """The layers, or only their number if the list is long."""
    text = ranges(layers)
    return text if len(text) <= _LIST // 2 else f"{len(layers)} layers"


def _advice(rows: Sequence[Row], errors: dict[str, dict[int, tuple[float, float, float]]]) -> list[str]:
    """Advice about the first method, with the other methods as alternatives."""
    hidden, times = _by_method(rows, HIDDEN), _by_method(rows, TIME)
    first = next(iter(errors))
    large = [layer for layer, error in errors[first].items() if not error[0] <= LARGE]
    before = hidden.get(first)
    if before is None:
        where = f"layers {ranges(large)}" if large else "no layer"
        return [
            f"{first} has an error above {LARGE} in {where}. Run with the whole model to see the error of its hidden "
            "states."
        ]
    better = sorted((hidden[name], name) for name in errors if name != first and hidden[name] < 0.9 * before)
    mended = [row for row in rows if row.quantity == HIDDEN and "exact" in row.facts]
    ways = () if before <= SMALL else (*(name for _, name in better), *(row.method for row in mended))
    doubts = _open_orders(rows, list(dict.fromkeys((first, *ways, "softmax"))))
    said = [too_busy(doubts, _turns(rows))] if doubts else []
    if (first, "softmax") not in doubts and times[first] >= times["softmax"]:
        said.append(
            f"At this length exact attention is as fast as {first} ({times['softmax']:.2f} ms a layer, "
            f"{times[first]:.2f} with {first}): leave the model as it is, or inspect it at the length that you need."
        )
    if before <= SMALL:
        advice = "" if said else " Keep it."
        return [*said, f"{first} fits this model: the hidden states have a relative error of {_short(before)}.{advice}"]
    layers = f"layers {ranges(large)}, and" if large else "no layer, but the errors add up:"
    said.append(
        f"{first} has an error above {LARGE} in {layers} the hidden states have a relative error of {_short(before)}."
    )
    for error, name in reversed(better):
        told = (name, "softmax") not in doubts
        said.append(f"{name}: an error of {_short(error)}, {_cost(times[name], first, times, told=told)}.")
    for row in mended:
        exact = [int(layer) for layer in row.facts["exact"].split(",")]
        share = len(exact) / len(errors[row.method])
        time = (1 - share) * times[row.method] + share * times["softmax"]
        told = (row.method, "softmax") not in doubts
        said.append(
            f"{row.method} with exact attention in layers {ranges(exact)}: an error of {_short(row.value)}, "
            f"{_cost(time, first, times, told=told)}."
        )
    if not better:
        said.append(
            "No other method that was measured has a much smaller error: name some with --methods, such as more "
            "landmarks."
        )
    return said


def _column(name: str) -> int:
    """How wide the column of a method is."""
    return 2 + max(len("0.123 ±0.012"), len(name))


def _wrapped(paragraphs: Sequence[str]) -> list[str]:
    return [line for paragraph in paragraphs for line in _BULLET.wrap(paragraph)]


def _by_layer(rows: Sequence[Row], quantity: str) -> dict[int, float]:
    heads: dict[int, list[float]] = {}
    for row in rows:
        if row.quantity == quantity:
            heads.setdefault(layer_and_head(row)[0], []).append(row.value)
    return {layer: _mean(values) for layer, values in heads.items()}


def _by_method(rows: Sequence[Row], quantity: str) -> dict[str, float]:
    """Values of whole models with one method in all layers."""
    return {row.method: row.value for row in rows if row.quantity == quantity and "exact" not in row.facts}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _short(error: float | None) -> str:
    return "-" if error is None else f"{error:.3f}" if error >= 0.0005 or not error else f"{error:.0e}"
