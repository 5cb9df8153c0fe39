import pytest

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.lines import draw_lines, spread


def test_names_at_the_ends_of_lines_keep_apart_and_stay_near():
    assert spread([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])
    crowded = spread([0.98, 0.5, 0.97, 0.99], 0.05)
    assert sorted(crowded) == pytest.approx([0.5, 0.9, 0.95, 1.0])
    # If there is room on both sides they part evenly.
    assert spread([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
    # The lowest of the three comes first, whatever their order in the figure.
    assert crowded.index(min(crowded[:1] + crowded[2:])) == 2


def test_many_lines_are_named_beside_their_ends_and_few_in_a_legend():
    def rows(count):
        return [
            Row(study="s", quantity="q", method=f"method {i}", value=float(i + n), unit="", device="d", n=n)
            for i in range(count)
            for n in (8, 16)
        ]

    for count in (3, 9):
        figure = draw_lines({"a panel": rows(count)}, over=lambda row: row.n, x_label="n", y_label="q", band="")
        named = [text.get_text() for text in figure.axes[0].texts]
        assert named == ([f"method {i}" for i in range(count)] if count == 9 else [])
        assert len(figure.legends) == (count == 3)


@pytest.mark.parametrize("of", ["smallest singular value, ridge {}", "a name that is half as wide as the page is, {}"])
def test_a_legend_is_as_wide_as_the_page_at_most(of):
    methods = [of.format(i) for i in range(6)]
    rows = [Row(study="s", quantity="q", method=of, value=1.0, unit="", device="d", n=8) for of in methods]
    figure = draw_lines({"a panel": rows}, over=lambda row: row.n, x_label="n", y_label="q", band="")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == methods
    assert legend.get_window_extent().width <= figure.bbox.width


@pytest.mark.parametrize("values", [(9, 80), (20, 80), (110, 900), (0.8, 1.8), (3.1, 3.2), (0.1, 100)])
def test_a_logarithmic_axis_has_two_numbers_at_least(values):
    rows = [
        Row(study="s", quantity="q", method="m", value=value, unit="", device="d", n=8 * (1 + place))
        for place, value in enumerate(values)
    ]
    figure = draw_lines({"a panel": rows}, over=lambda row: row.n, x_label="n", y_label="q", band="")
    figure.draw_without_rendering()
    axis, (low, high) = figure.axes[0].yaxis, figure.axes[0].get_ylim()
    assert sum(low <= place <= high for place in axis.get_majorticklocs()) >= 2


def test_a_line_of_one_point_is_seen():
    """Exact attention is a line without a marker in other figures."""
    rows = [Row(study="s", quantity="q", method="softmax", value=1.0, unit="", device="d", n=8)]
    figure = draw_lines({"a panel": rows}, over=lambda row: row.n, x_label="n", y_label="q", band="")
    assert figure.axes[0].get_lines()[0].get_marker() == "x"
