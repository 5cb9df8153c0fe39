import dataclasses
import io
import math

import pytest
from rich.console import Console

from nystrom_lab.measure.rows import Row
from nystrom_papers.report.tables import of_device, print_study, study_markdown

# Table 1 of the paper at n = 4096 and 8192: ms and MB.
PAPER = {
    "softmax-materialised": {4096: (32.9, 2620.0), 8192: (155.4, 10233.0)},
    "linformer-256": {4096: (5.3, 366.0), 8192: (11.3, 635.0)},
    "longformer-257": {4096: (18.5, 263.0), 8192: (36.2, 455.0)},
}


def a_row(method, n, quantity, value, unit, **changes):
    fields = {"study": "efficiency", "repeats": 7, "facts": {"b": 1, "h": 8}, "device": "a GPU"}
    fields["command"] = "nystrom bench"
    return Row(method=method, n=n, quantity=quantity, value=value, unit=unit, **fields | changes)


@pytest.fixture
def rows():
    return [
        a_row(method, n, f"forward {what}", value, unit)
        for method, lengths in PAPER.items()
        for n, values in lengths.items()
        for what, value, unit in zip(("time", "memory"), values, ("ms", "MB"), strict=True)
    ]


def printed(rows, width):
    text = io.StringIO()
    print_study(rows, Console(file=text, width=width))
    return text.getvalue()


def test_ratios_are_those_of_the_papers_table(rows):
    lines = study_markdown(rows).splitlines()
    assert lines[:5] == [
        "| forward time (ms) | n = 4096 | n = 8192 |",
        "|---|---:|---:|",
        "| softmax-materialised | 32.9 (1.0×) | 155 (1.0×) |",
        "| linformer-256 | 5.30 (6.2×) | 11.3 (13.8×) |",
        "| longformer-257 | 18.5 (1.8×) | 36.2 (4.3×) |",
    ]
    assert "| linformer-256 | 366 (7.2×) | 635 (16.1×) |" in lines


def test_markdown_says_how_and_on_what_it_was_measured(rows):
    text = study_markdown(rows)
    assert "\n    nystrom bench\n" in text
    assert "b=1 h=8, float32, a GPU, torch " in text
    assert "Median of 7 interleaved calls" in text


def test_what_was_not_measured_is_a_dash_with_its_reason(rows):
    note = "needs about 17.2 GB [and more]"
    rows += [a_row("softmax-materialised", 16384, "forward time", math.nan, "ms", repeats=0, note=note)]
    rows += [a_row("linformer-256", 16384, "forward time", 23.5, "ms")]
    text = study_markdown(rows)
    assert "| softmax-materialised | 32.9 (1.0×) | 155 (1.0×) | – |" in text
    # No ratio where the first method has no value.
    assert "| linformer-256 | 5.30 (6.2×) | 11.3 (13.8×) | 23.5 |" in text
    assert f"- softmax-materialised, forward, n = 16384: {note}." in text
    assert note in " ".join(printed(rows, width=200).split())


def test_nothing_is_no_multiple_of_nothing():
    rows = [a_row(name, 512, "bytes sent", value, "MB") for name, value in (("one", 0.0), ("four", 0.4))]
    assert "| one | 0 |" in study_markdown(rows)
    assert "| four | 0.40 |" in study_markdown(rows)


def test_lengths_and_quantities_come_in_order(rows):
    assert study_markdown(rows[::-1][-4:] + rows[::-1]).splitlines()[0].endswith("| n = 4096 | n = 8192 |")
    backward = [a_row("softmax", 512, "forward+backward time", 3.0, "ms")]
    text = study_markdown(backward + rows)
    places = [text.index(f"| {part} (") for part in ("forward time", "forward memory", "forward+backward time")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0212, "0.021"), (0.153, "0.15"), (1.534, "1.53"), (99.96, "100"), (0.996, "1.0"), (1530.4, "1530")],
)
def test_values_have_two_or_three_figures(value, shown):
    text = study_markdown([a_row("softmax", 512, "forward time", value, "ms")])
    assert f"| softmax | {shown} (1.0×) |" in text


def test_rows_of_another_study_raise():
    with pytest.raises(ValueError, match="of 'approximation'; expected rows of one study of 'efficiency', 'model'"):
        study_markdown([a_row("softmax", 512, "error", 0.1, "", study="approximation")])
    with pytest.raises(ValueError, match="rows are of no study"):
        study_markdown([])


def test_rows_of_one_device_can_be_taken(rows):
    both = [*rows, *(dataclasses.replace(row, device="another", value=2 * row.value) for row in rows)]
    with pytest.raises(ValueError, match=r"twice, on a GPU .* and on another .*: show each measurement alone"):
        study_markdown(both)
    assert of_device(both, "a GPU") == rows
    with pytest.raises(ValueError, match="device is 'TPU'; expected a part of one of 'a GPU', 'another'"):
        of_device(both, "TPU")
