import numpy as np
import pytest
from matplotlib.colors import LogNorm, SymLogNorm

from nystrom_papers.report.plots.maps import draw_maps, scale_of


def test_the_same_weight_has_the_same_colour_in_every_figure():
    for largest in (0.01, 0.9):
        norm, _ = scale_of([np.array([[0.0, -1.0, largest]])], "weights")
        assert isinstance(norm, LogNorm)
        assert (norm.vmin, norm.vmax) == (1e-4, 1e-1)
        assert norm(np.array([-1.0, 0.0, 1e-4, 1.0])).tolist() == pytest.approx([0, 0, 0, 1])


def test_signed_numbers_have_a_scale_with_zero_in_the_middle():
    norm, style = scale_of([np.array([[-3.0, 0.0, 2.0]]), np.zeros((2, 2))], "signed")
    assert isinstance(norm, SymLogNorm)
    assert norm.vmin == -norm.vmax
    assert float(norm(0.0)) == pytest.approx(0.5)
    assert style["cmap"] == "RdBu_r"


def test_a_grid_has_titles_captions_and_one_bar_that_says_what_a_colour_means():
    lines = {f"head {i}": {"a": np.full((4, 4), 0.1), "b": np.full((4, 2), 0.01)} for i in range(3)}
    figure = draw_maps(
        lines, columns={"a": "exact", "b": "near"}, bar="weight", captions={("head 1", "b"): "error 0.5"}, across=2
    )
    *panels, bar = figure.axes
    assert [axes.get_title() for axes in panels[:4]] == ["exact", "near", "exact", "near"]
    # Two groups of columns: the third head is to the right of the first, and its place below is empty.
    assert [axes.get_ylabel() for axes in panels] == ["head 0", "", "head 2", "", "head 1", "", "", ""]
    assert panels[5].get_xlabel() == "error 0.5"
    assert bar.get_ylabel() == "weight"
    assert sum(len(axes.images) for axes in panels) == 6
