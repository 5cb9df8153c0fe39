"""The two papers' tables of time and memory: their rules in both directions, on rows made by hand."""

import math
from dataclasses import replace

import pytest
import torch

from nystrom_lab.measure.rows import new_row
from nystrom_lab.report.printed_ratios import BASE, NYSTROMFORMER_TABLE_1, SKYFORMER_TABLE_2
from nystrom_lab.studies.reproduce.catalogue import find_study
from nystrom_lab.studies.reproduce.study import Setting

TABLE_1, TABLE_2 = "nystromformer-table-1", "skyformer-table-2"


def row(name, quantity, method, value, n=None):
    note = "too long" if math.isnan(value) else ""
    return new_row(
        study=name, quantity=quantity, method=method, value=value, unit="", device="cpu", n=n, facts={"b": 1}, note=note
    )


@pytest.fixture
def table_1():
    """What the paper printed, as rows."""
    return [
        row(TABLE_1, f"forward {what}", method, cells[n][place], n)
        for method, cells in NYSTROMFORMER_TABLE_1.items()
        for n in cells
        for place, what in enumerate(("memory", "time"))
    ]


@pytest.fixture
def table_2():
    return [
        row(TABLE_2, f"{task} step {what}", method, pair[place], 9)
        for method, cells in SKYFORMER_TABLE_2.items()
        for task, pair in cells.items()
        for place, what in enumerate(("time", "memory"))
    ]


def words(name, rows):
    return [verdict.word for verdict in find_study(name).verdicts(rows)]


def test_the_printed_numbers_agree_with_their_own_claims(table_1, table_2):
    assert words(TABLE_1, table_1) == ["agrees"] * 4
    # Kernelized attention's printed time on Text is 3.91 of 4.30 hours.
    assert words(TABLE_2, table_2) == ["agrees"] * 4


def test_each_claim_of_table_1_can_fail(table_1):
    squared = [replace(r, value=r.value * r.n / 512) if r.method == "nystrom-32" else r for r in table_1]
    assert words(TABLE_1, squared)[0] == "does not agree"
    slow = [replace(r, value=1e6) if r.method == "nystrom-64" and r.quantity == "forward time" else r for r in table_1]
    assert words(TABLE_1, slow)[1] == "does not agree"
    reversed_ = [replace(r, value=1 / r.value) for r in table_1]
    assert words(TABLE_1, reversed_)[2:] == ["does not agree"] * 2
    short = [r for r in table_1 if r.n <= 4096]
    assert words(TABLE_1, short) == ["agrees"] * 3 + ["cannot tell"]
    one = [r for r in table_1 if r.n == 512]
    assert words(TABLE_1, one) == ["cannot tell", "agrees", "agrees", "cannot tell"]


def test_each_claim_of_table_2_can_fail(table_2):
    slow = [replace(r, value=1e6) if r.method == "skyformer-128" else r for r in table_2]
    assert words(TABLE_2, slow)[:2] == ["does not agree"] * 2
    fast = [replace(r, value=r.value / 9) if r.method == "kernelized" else r for r in table_2]
    assert words(TABLE_2, fast)[2] == "does not agree"
    assert words(TABLE_2, [replace(r, value=1 / r.value) for r in table_2])[3] == "does not agree"
    unmeasured = [replace(r, value=math.nan, note="too long") if r.method == BASE else r for r in table_2]
    assert words(TABLE_2, unmeasured)[:3] == ["cannot tell"] * 3


def test_tables_have_the_printed_ratios_beside_ours(table_1, table_2):
    memory, compared, time, _ = find_study(TABLE_1).tables(table_1)
    assert memory.heads == ["method", "n=512", "n=1024", "n=2048", "n=4096", "n=8192"]
    assert time.lines[0] == [BASE, "0.8", "2.4", "10", "32.9", "155"]
    assert compared.lines[-1] == ["nystrom-32", "2.1 / 2.1", "3.8 / 3.8", "7.1 / 7.1", "13.6 / 13.6", "26.7 / 26.7"]
    for table in [*find_study(TABLE_1).tables(table_1), *find_study(TABLE_2).tables(table_2)]:
        widths = [max(map(len, column)) for column in zip(table.heads, *table.lines, strict=True)]
        # What a terminal of 80 columns shows without folding.
        assert sum(widths) + 2 * len(widths) <= 80


def test_figures_are_drawn_of_the_rows_of_a_study(table_1, table_2, tmp_path):
    assert len(find_study(TABLE_1).figures(table_1, tmp_path)[""].axes) == 4
    assert len(find_study(TABLE_2).figures(table_2, tmp_path)[""].axes) == 10


def test_a_part_is_a_length_and_measures_each_method_in_both_passes(tmp_path):
    plan = find_study(TABLE_1).plan(Setting())
    assert [part.name for part in plan.parts] == ["n=512", "n=1024", "n=2048", "n=4096"]
    rows = list(plan.parts[0].measure(tmp_path))
    assert {(r.n, r.method) for r in rows} == {(512, method) for method in plan.setting["methods"].split()}
    assert {r.quantity for r in rows} == {
        f"{p} {w}" for p in ("forward", "forward+backward") for w in ("time", "memory")
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", [TABLE_1, TABLE_2])
def test_the_papers_size_needs_a_gpu(name):
    with pytest.raises(ValueError, match="torch finds none here") as error:
        find_study(name).plan(Setting(size="paper"))
    assert "\n" not in str(error.value)


def test_small_batches_are_an_eighth_of_the_papers():
    plan = find_study(TABLE_2).plan(Setting())
    assert plan.setting["batches"] == "listops 4, text 2, retrieval 2, image 32, pathfinder 16"
    assert "eighth" in plan.differs
