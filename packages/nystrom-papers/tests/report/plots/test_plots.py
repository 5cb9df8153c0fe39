import math
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.canvas import METHOD_LOOKS, check_figure, method_look, method_looks
from nystrom_lab.report.plots.curves import draw_curves, draw_over_minutes
from nystrom_papers.report import show_study
from nystrom_papers.report.plots.speed import draw_study, families


def test_importing_reports_loads_neither_torch_nor_drawing():
    code = "import sys, nystrom_papers.report.plots.speed, nystrom_papers.report.tables; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "matplotlib", "rich", "numpy"}.isdisjoint(done.stdout.split())


@pytest.fixture
def rows():
    of = {"study": "efficiency", "device": "cpu", "facts": {"b": 1}}
    return [
        Row(quantity=f"{timed} {what}", method=method, n=n, value=n / 10, low=n / 20, high=n / 5, unit=unit, **of)
        for method in ("softmax", "nystrom-64", "nystrom-64+skip")
        for n in (512, 1024, 2048)
        for timed in ("forward", "forward+backward")
        for what, unit in (("time", "ms"), ("memory", "MB"))
    ]


def lines_of(axes):
    return {line.get_label(): line for line in axes.lines}


@pytest.mark.long
def test_figures_are_png_or_svg_and_drawn_again_the_same(rows, tmp_path):
    for name in ("a.png", "a.svg", "b.svg"):
        draw_study(rows, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "a.svg").read_text().count("<svg") == 1
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    with pytest.raises(ValueError, match=r"figure is a\.pdf; expected a file name that ends in \.png or \.svg"):
        check_figure(Path("a.pdf"))


def test_a_figure_has_its_folder_made_before_it_is_drawn(tmp_path):
    check_figure(tmp_path / "new" / "folder" / "a.png")
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file cannot be written \(.*\): choose another folder"):
        check_figure(tmp_path / "file" / "a.png")


def test_each_method_has_a_line_and_a_band(rows, drawn, tmp_path):
    draw_study(rows, tmp_path / "all.png")
    axes = drawn[0].axes[0]
    assert list(lines_of(axes)) == ["softmax", "nystrom-64", "nystrom-64+skip"]
    assert list(axes.lines[0].get_ydata()) == [51.2, 102.4, 204.8]
    assert len(axes.collections) == 3
    legend = drawn[0].axes[-1].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["softmax", "nystrom-64", "nystrom-64+skip"]


@pytest.mark.long
def test_legends_side_by_side_do_not_overlap(rows, drawn, tmp_path):
    others = ("softmax-materialised", "linformer-256", "performer-256", "longformer-257", "informer-128", "reformer-2")
    names = (*others, "authors-64", "transformers-64+skip", "nystrom-attention-64+skip", "authors-64+skip")
    more = [replace(row, method=name) for name in names for row in rows if row.method == "softmax"]
    draw_study(rows + more, tmp_path / "all.png")
    boxes = [legend.get_window_extent() for axes in drawn[0].axes if (legend := axes.get_legend()) is not None]
    assert len(boxes) == 3
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


@pytest.mark.parametrize(
    "name", ["nystrom-64", "nystrom-64+skip, nystromformer", "nystrom-64 (nystromformer)", "nystrom, 4000"]
)
def test_a_size_and_what_follows_it_keep_their_methods_look(name):
    assert method_look(name) == METHOD_LOOKS["nystrom"]
    assert method_look(name.replace("nystrom", "longformer", 1)) == METHOD_LOOKS["longformer"]
    assert method_look("softmax-materialised") == METHOD_LOOKS["softmax-materialised"]


@given(st.text(alphabet="-+,( 16²٣askip"))
def test_the_base_of_a_name_is_that_of_the_regular_expression_that_took_quadratic_time(end):
    base = re.sub(r"(-\d+)*(\+skip)?(,.*| \(.*)?$", "", name := f"nystrom{end}")
    assert method_look(name) == method_look(base)
    assert (method_look(name) == METHOD_LOOKS["nystrom"]) == (base == "nystrom")


@pytest.mark.parametrize("method", ["softmax", "nystrom", "nystrom-uniform", "near_far", "skyformer", "unheard-of"])
def test_many_sizes_of_a_method_look_different(method):
    names = [f"{method}-{size}" for size in range(20)]
    looks = method_looks(names)
    assert len({*looks.values()}) == len(names)
    assert looks[names[0]] == method_look(method)
    # Black has no darker shade.
    assert len({look.colour for look in looks.values()}) == (2 if method == "near_far" else 3)
    for first, second in pairwise(looks.values()):
        assert first.marker != second.marker
        assert first.line != second.line


@pytest.mark.long
def test_the_default_methods_have_a_colour_each_within_their_panel(rows, drawn, tmp_path):
    from nystrom_papers.bench.contenders import DEFAULT

    names = [*DEFAULT, "nystrom-64+skip", "authors-64+skip"]
    draw_study([replace(row, method=name) for name in names for row in rows if row.method == "softmax"],
                    tmp_path / "all.png")  # fmt: skip
    shown = {name for panel in families(names).values() for name in panel}
    assert shown == set(names) - {"softmax", "softmax-materialised"}
    for axes in drawn[0].axes:
        looks = [(line.get_color(), line.get_linestyle()) for line in axes.lines]
        assert len(set(looks)) == len(looks) <= 9


def test_what_was_not_measured_is_absent(rows, drawn, tmp_path):
    large = {"value": math.nan, "low": None, "high": None, "note": "too large"}
    rows = [replace(row, **large) if row.n == 2048 and row.method == "softmax" else row for row in rows]
    draw_study(rows, tmp_path / "all.png")
    softmax, other, _ = drawn[0].axes[0].lines
    assert list(softmax.get_xdata()) == [512, 1024]
    assert list(other.get_xdata()) == [512, 1024, 2048]


@pytest.mark.long
def test_an_efficiency_run_is_shown_and_its_files_named(rows, tmp_path, capsys):
    show_study(rows, tmp_path)
    text = capsys.readouterr().out
    assert "forward time (ms)" in text
    assert str(tmp_path / "efficiency.csv") in text
    assert {path.name for path in tmp_path.iterdir()} == {"efficiency.png", "efficiency.svg"}


def test_training_steps_have_a_dot_per_method_in_each_task(drawn, tmp_path):
    rows = [
        Row(
            study="training", quantity=f"{task} step {what}", method=method, n=24, value=value, unit=unit, device="cpu",
            facts={"b": 2, "layers": 2}, note="too long" if math.isnan(value) else "",
        )
        for task in ("text", "image")
        for method, value in (("softmax", 4.0), ("nystrom-8", math.nan if task == "image" else 2.0))
        for what, unit in (("time", "ms"), ("memory", "MB"))
    ]  # fmt: skip
    draw_study(rows, tmp_path / "training.png")
    text_time, image_time, *_ = drawn[0].axes
    # A logarithmic axis has no zero for a bar to start at.
    assert not any(axes.containers or axes.patches for axes in drawn[0].axes)
    assert {axes.get_xscale() for axes in drawn[0].axes} == {"log"}
    assert [text.get_text() for text in text_time.get_yticklabels()] == ["softmax", "nystrom-8"]
    dots = {label: list(line.get_xdata()) for label, line in lines_of(text_time).items() if label[0] != "_"}
    assert dots == {"softmax": [4.0], "nystrom-8": [2.0]}
    assert [text.get_text() for text in image_time.texts] == ["not measured"]
    assert [axes.get_title() for axes in drawn[0].axes[:2]] == ["text\nn = 24, b=2", "image\nn = 24, b=2"]
    with pytest.raises(ValueError, match="no measurement"):
        draw_study([replace(row, value=math.nan, note="too long") for row in rows], tmp_path / "none.png")


def test_curves_have_a_panel_for_losses_and_one_for_accuracies(drawn, tmp_path):
    lines = ["step,quantity,value", "20,train loss,1.5", "10,train loss,2.0", "20,validation loss,1.8"]
    lines += ["20,validation accuracy,0.5", "20,learning rate,0.001"]
    (tmp_path / "curves.csv").write_text("\n".join(lines) + "\n")
    draw_curves(tmp_path / "curves.csv", tmp_path / "curves.png")
    loss, accuracy, rate = drawn[0].axes
    # A quantity without a split is named once, on its axis.
    assert (rate.get_ylabel(), rate.get_legend()) == ("learning rate", None)
    assert [line.get_label() for line in loss.lines] == ["train", "validation"]
    assert (list(loss.lines[0].get_xdata()), list(loss.lines[0].get_ydata())) == ([10, 20], [2.0, 1.5])
    assert [line.get_label() for line in accuracy.lines] == ["validation"]
    assert accuracy.lines[0].get_color() == loss.lines[1].get_color() != loss.lines[0].get_color()
    assert (loss.get_ylabel(), accuracy.get_ylabel()) == ("loss", "accuracy")
    assert (tmp_path / "curves.png").exists()


def test_curves_of_many_kinds_take_several_lines_and_what_is_zero_has_no_axis_below(drawn, tmp_path):
    kinds = ("train loss", "validation loss", "validation accuracy", "validation F1", "learning rate", "gradient norm")
    lines = [f"{step},{kind},{0.0 if kind.endswith('F1') else 0.5 + step}" for kind in kinds for step in (10, 20)]
    (tmp_path / "curves.csv").write_text("\n".join(["step,quantity,value", *lines]) + "\n")
    draw_curves(tmp_path / "curves.csv", tmp_path / "curves.png")
    places = [axes.get_subplotspec() for axes in drawn[0].axes if axes.get_visible()]
    assert [(place.rowspan.start, place.colspan.start) for place in places] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert drawn[0].axes[2].get_ylim() == (0, 1)


def test_one_quantity_of_several_runs_is_drawn_over_their_minutes(drawn, tmp_path):
    lines = ["run,step,quantity,value,seconds", "a,20,error,.1,120", "a,0,error,.2,60"]
    lines += ["a,0,loss,1,60", "b,0,error,.3,0"]
    (tmp_path / "curves.csv").write_text("\n".join(lines) + "\n")
    draw_over_minutes(tmp_path / "curves.csv", tmp_path / "error.png", "error")
    (axes,) = drawn[0].axes
    found = [(line.get_label(), list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    assert found == [("a", [1, 2], [0.2, 0.1]), ("b", [0], [0.3])]
    with pytest.raises(ValueError, match=r"curves\.csv has no distance"):
        draw_over_minutes(tmp_path / "curves.csv", tmp_path / "error.png", "distance")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n", r"curves\.csv, line 1 is 'a,b'; expected step,quantity,value"),
        ("step,quantity,value\n", r"curves\.csv holds no rows"),
        ("step,quantity,value\n1,loss,2\nx,loss,2\n", r"curves\.csv, line 3 is 'x,loss,2'"),
        ("step,quantity,value\n1,loss\n", r"curves\.csv, line 2 is '1,loss'"),
        ("step,quantity,value,seconds\n1,loss,2\n", r"line 2 is '1,loss,2'; expected step,quantity,value,seconds"),
    ],
)
def test_other_files_raise_by_line(content, message, tmp_path):
    (tmp_path / "curves.csv").write_text(content)
    with pytest.raises(ValueError, match=message):
        draw_curves(tmp_path / "curves.csv", tmp_path / "curves.png")
