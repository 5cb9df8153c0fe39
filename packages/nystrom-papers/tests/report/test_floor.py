import pytest

from nystrom_lab.measure.rows import Row
from nystrom_papers.report.floor import bandwidths, with_derived
from nystrom_papers.report.tables import study_markdown


def row(quantity, value, method, n=1000, dtype="bfloat16"):
    unit = {"time": "ms", "memory": "MB", "bandwidth": "GB/s"}[quantity.split()[-1]]
    return Row(study="efficiency", quantity=quantity, value=value, method=method, unit=unit, device="a GPU", n=n,
                   facts={"b": 2, "h": 5, "d": 10, "kernel": 33}, dtype=dtype, command="bench")  # fmt: skip


# One tensor of n x d is 2 x 5 x 1000 x 10 x 2 bytes: 0.2 MB.
ROWS = [row("forward time", 3.0, "softmax"), row("forward memory", 0.6, "softmax")]
ROWS += [row("forward time", 1.5, "nystrom-64"), row("forward memory", 0.24, "nystrom-64")]
ROWS += [row("forward+backward memory", 0.84, "nystrom-64")]
ROWS += [row("copy bandwidth", 4000.0, "floor"), row("forward time", 1.0, "floor")]


def derived():
    return {(row.method, row.quantity): row.value for row in with_derived(ROWS) if row.unit not in ("ms", "MB")}


def test_times_are_divided_by_the_floor_of_the_same_pass_and_length():
    assert derived()["softmax", "forward time over the floor"] == 3.0
    assert derived()["nystrom-64", "forward time over the floor"] == 1.5
    other = [*ROWS, row("forward time", 7.0, "softmax", n=2000)]
    assert not any(row.n == 2000 and "floor" in row.quantity for row in with_derived(other))


def test_extra_memory_leaves_out_results_and_is_in_percent_of_inputs_and_output():
    assert derived()["softmax", "forward extra memory"] == pytest.approx(100 * 0.4 / 0.8)
    assert derived()["nystrom-64", "forward extra memory"] == pytest.approx(5)
    # The output, and three gradients.
    assert derived()["nystrom-64", "forward+backward extra memory"] == pytest.approx(5)


def test_without_a_floor_rows_stay_as_they_are():
    rows = [row for row in ROWS if row.method != "floor"]
    assert with_derived(rows) == rows
    assert bandwidths(rows) == []


def test_the_table_shows_the_floor_its_bandwidth_and_multiples_of_it():
    text = study_markdown(ROWS)
    assert "| floor | 1.00 (3.0×) |" in text
    assert "| forward time over the floor (times) | n = 1000 |" in text
    assert "| nystrom-64 | 1.50 |" in text
    assert "| nystrom-64 | 5.00 |" in text
    assert "copy bandwidth" not in text
    assert "at the 4000 GB/s that a copy reached" in text
    # Measured parts come before those derived from them.
    order = ("forward time (ms)", "forward time over", "forward memory", "forward extra", "forward+backward mem")
    places = [text.index(f"| {name}") for name in order]
    assert places == sorted(places)
