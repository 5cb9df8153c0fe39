"""Figures of hand-made rows."""

from dataclasses import replace

import numpy as np
import pytest

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.inspection import DISTANCE, ENTROPY, ERROR, HIDDEN, NEAR, RANK
from nystrom_lab.report.plots.inspection import inspection_figures

ROW = Row(study="inspect", quantity=ERROR, method="a", value=1, unit="", device="cpu", command="c")
METHODS = {"nystrom-32": 32, "nystrom-64": 64, "linear": None}


@pytest.fixture
def rows():
    found = []
    for layer in (0, 2):
        for head in range(3):
            at = {"facts": {"layer": layer, "head": head, "r": 8}}
            found += [replace(ROW, method=name, m=m, value=(1 + layer + head) / 8, **at) for name, m in METHODS.items()]
            found += [
                replace(ROW, quantity=fact, method="softmax", value=1 + head, **at)
                for fact in (ENTROPY, DISTANCE, NEAR, RANK)
            ]
    return found + [replace(ROW, quantity=HIDDEN, method=name, m=m, value=0.5) for name, m in METHODS.items()]


def test_maps_hold_layers_by_heads_with_layers_that_stay_exact_blank(rows):
    figure = inspection_figures(rows, lambda name: name.split("-")[0])["errors"]
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == list(METHODS)
    values = np.ma.filled(panels[0].images[0].get_array(), np.nan)
    np.testing.assert_allclose(values, [[1 / 8, 2 / 8, 3 / 8], [np.nan] * 3, [3 / 8, 4 / 8, 5 / 8]])
    # One scale for all.
    assert {axes.images[0].get_clim() for axes in panels} == {(0, 1)}


def test_errors_are_drawn_over_the_sizes_of_those_methods_that_have_one(rows):
    figures = inspection_figures(rows, lambda name: name.split("-")[0])
    heads, hidden = figures["sizes"].axes
    (line,) = heads.get_lines()
    assert line.get_label() == "nystrom"
    np.testing.assert_allclose(line.get_xydata(), [[32, 3 / 8], [64, 3 / 8]])
    np.testing.assert_allclose(hidden.get_lines()[0].get_ydata(), [0.5, 0.5])
    # Rows of a file have a fingerprint.
    named = inspection_figures([row.with_facts(fingerprint="0-1") for row in rows], str)
    assert len(named["sizes"].axes) == 2
    assert "sizes" not in inspection_figures([replace(row, m=None) for row in rows], str)
