import math

import pytest

from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.reproduce.declared import LONGEST, Cells, Claim, Lines, Pivot, each, frame_of, only, select


def row_of(quantity, value, *, method="nystrom", n=512, m=None, low=None, high=None, **facts):
    return Row(
        study="", quantity=quantity, method=method, value=value, unit="", device="d", n=n, m=m, low=low, high=high,
        facts=facts, note="too long" if math.isnan(value) else "",
    )  # fmt: skip


ROWS = frame_of([
    row_of("error", 0.5, m=16, layer=0, low=0.4, high=0.7),
    row_of("error", 0.25, m=64, layer=0),
    row_of("error", 0.125, method="softmax", layer=1),
    row_of("bound", 2.0, m=16, n=1024),
    row_of("time", math.nan, m=16),
])  # fmt: skip


def test_a_frame_keeps_whole_numbers_and_a_row_without_a_spread_is_its_value():
    first, second, third = each(ROWS, "error")
    assert (first.m, third.m, first.low, second.low, second.high) == (16, None, 0.4, 0.25, 0.25)
    assert (first.number, third.number, each(ROWS, "bound")[0].layer) == ("1", "2", "")


@pytest.mark.parametrize(
    ("where", "values"),
    [
        ({"m": (16, None)}, [0.5, 0.125]),
        ({"m": None}, [0.125]),
        ({"layer": "0", "method": "nystrom"}, [0.5, 0.25]),
        ({"weights": "pretrained"}, []),
        ({"weights": ""}, [0.5, 0.25, 0.125]),
    ],
)
def test_rows_are_selected_by_columns_and_facts(where, values):
    assert [row.value for row in each(ROWS, "error", **where)] == values
    assert list(select(ROWS, n=LONGEST)["quantity"]) == ["bound"]


def test_a_pivot_names_and_orders_its_lines_and_marks_what_is_missing():
    columns = [Cells("m={m}", "error", "{value:.2f}", m=(16, 64)), Cells("time", "time"), Cells("all", "error", m=None)]
    names = {"method": {"softmax": "exact", "nystrom": "Nyström"}}
    pivot = Pivot(title="errors at n = {n}", index={"method": "{method}"}, columns=columns, names=names)
    (table,) = pivot.tables(ROWS)
    assert (table.title, list(table.heads)) == ("errors at n = 512", ["method", "m=16", "m=64", "time", "all"])
    assert table.lines == [["Nyström", "0.50", "0.25", "–", "–"], ["exact", "–", "–", "–", "0.125"]]


def test_two_rows_in_one_cell_raise_unless_one_is_picked():
    index = {"method": "{method}"}
    with pytest.raises(ValueError, match="two rows fill 'error' of nystrom in the table 'errors'"):
        Pivot(title="errors", index=index, columns=[Cells("error", "error")]).tables(ROWS)
    for pick, text in ((min, "0.25"), (max, "0.5")):
        (table,) = Pivot(title="errors", index=index, columns=[Cells("error", "error", pick=pick)]).tables(ROWS)
        assert table.lines[0] == ["nystrom", text]


def test_a_claim_without_its_rows_cannot_be_told_and_says_which():
    claim = Claim("It is small.", lambda rows: (only(rows, "error", m=64).value < 1, "0.25."))
    assert claim.decide(ROWS, ours=True) == ("It is small.", True, "0.25.", True)
    assert claim.decide(ROWS, ours=False).ours is False
    unknown = claim.decide(ROWS.iloc[:1], ours=True)
    assert unknown.agrees is None
    assert "there are 0 rows of error m=64; expected one" in unknown.numbers


def test_lines_are_drawn_in_panels_and_a_figure_without_rows_is_left_out():
    shown = {"over": "m", "panel": "{quantity}", "x_label": "m", "y_label": "error", "band": ""}
    figure = Lines(of={"quantity": ("error", "bound")}, **shown).draw(ROWS)
    assert [axes.get_title() for axes in figure.axes] == ["error", "bound"]
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["nystrom", "softmax"]
    assert Lines(of={"quantity": "memory"}, **shown).draw(ROWS) is None
