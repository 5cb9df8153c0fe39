"""The table of the counted kernels: one part per pass, one line per kernel.

MB are 10^6 bytes. Below each part are its launches, bytes and extra memory, each with what it is compared with.
"""

import math
from collections.abc import Sequence

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.table import Table, markdown_table, print_table

COLUMNS = ("launches", "programs", "registers", "stack", "shared memory", "bytes", "passes")
_HEADS = ("launches", "programs", "registers", "stack (bytes)", "shared (KiB)", "MB", "passes over n x d")
_SHORT = ("launches", "programs", "registers", "stack\nbytes", "shared\nKiB", "MB", "passes")
_PASSES = ("forward", "backward")
# q, k, v and the output.
_INPUTS = 4


def kernel_lines(rows: Sequence[Row], timed: str) -> list[tuple[str, list[str]]]:
    """The lines of a pass, in the order of launches: the name of the kernel and one cell per column.

    Raises:
        ValueError: The rows are of another study or of several methods.
    """
    method = _method(rows)
    found = {tuple(row.quantity.split(" ", 2)): row.value for row in rows if row.method == method}
    kernels = list(dict.fromkeys(kernel for name, kernel, _ in found if name == timed and kernel != "all"))
    lines = []
    for kernel in kernels:
        values = {what: found.get((timed, kernel, what)) for what in COLUMNS}
        name = "operators of torch" if kernel == "torch" else kernel
        lines.append((name, [_cell(what, value) for what, value in values.items()]))
    return lines


def kernel_notes(rows: Sequence[Row], timed: str) -> str:
    """The cost of a whole pass, compared with the torch path and the floor."""
    method, first = _method(rows), rows[0]
    others = list(dict.fromkeys(row.method for row in rows if row.method not in (method, "floor")))
    found = {(row.method, row.quantity): row.value for row in rows}
    launches, size, memory = (found[method, f"{timed} all {what}"] for what in ("launches", "bytes", "memory"))
    floor = found["floor", f"{timed} all bytes"]
    width = {"float32": 4}.get(first.dtype, 2)
    inputs = _INPUTS * math.prod(int(first.facts[name]) for name in "bhd") * (first.n or 0) * width
    return (
        f"{timed}: {launches:.0f} launches, an operator of torch counted as one"
        + "".join(f"; {found[name, f'{timed} all launches']:.0f} in {name}" for name in others)
        + f". {size / 1e6:.0f} MB, {size / floor:.2f} times the floor of {floor / 1e6:.0f} MB. "
        f"Extra memory {memory / 1e6:.1f} MB, {100 * memory / inputs:.1f} % of q, k, v and the output."
    )


def kernels_markdown(rows: Sequence[Row]) -> str:
    """Tables of both passes as Markdown, with the command that compiled the kernels."""
    text = []
    for timed in _PASSES:
        lines = [[name, *cells] for name, cells in kernel_lines(rows, timed)]
        text += [markdown_table(Table("", (timed, *_HEADS), lines)), kernel_notes(rows, timed), ""]
    return "\n".join([*text, "Counted by", "", f"    {rows[0].command}", "", f"{_title(rows)}."]) + "\n"


def print_kernels(rows: Sequence[Row]) -> None:
    """Print the table of both passes."""
    lines: list[list[str]] = []
    for timed in _PASSES:
        lines += [[timed], *([name, *cells] for name, cells in kernel_lines(rows, timed))]
    notes = "\n".join(kernel_notes(rows, timed) for timed in _PASSES)
    print_table(Table(_title(rows), ["", *_SHORT], lines, notes=notes))


def _method(rows: Sequence[Row]) -> str:
    """The method that the kernels compute."""
    if not rows or {row.study for row in rows} != {"kernels"}:
        came = ", ".join(sorted({repr(row.study) for row in rows})) or "none"
        raise ValueError(
            f"rows are of {came}; expected rows of the study 'kernels', as python -m tools.kernel_accounting count "
            "writes them."
        )
    methods = list(dict.fromkeys(row.method for row in rows if row.quantity.endswith(" registers")))
    if len(methods) != 1 or len({row.command for row in rows}) != 1:
        raise ValueError(f"rows are of {', '.join(methods) or 'no method'}; expected those of one command.")
    return methods[0]


def _cell(what: str, value: float | None) -> str:
    if value is None:
        return ""
    scaled = {"bytes": value / 1e6, "shared memory": value / 1024}.get(what, value)
    return (
        f"{scaled:.2f}"
        if what in ("bytes", "passes")
        else f"{scaled:.4g}"
        if what == "shared memory"
        else f"{scaled:.0f}"
    )


def _title(rows: Sequence[Row]) -> str:
    row = rows[0]
    sizes = f"n={row.n} m={row.m} {row.words}"
    return f"{_method(rows)}, {sizes}, {row.dtype}, {row.device}, torch {row.torch}, commit {row.commit}, {row.date}"
