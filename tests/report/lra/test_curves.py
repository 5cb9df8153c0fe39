"""Validation accuracy over time: a panel per task, a line per method, the mean of its seeds."""

import json

import matplotlib.figure
import pytest

from nystrom.report.lra.curves import draw_lra_curves


@pytest.fixture
def drawn(monkeypatch):
    figures = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda self, *_, **__: figures.append(self))
    return figures


def add_run(folder, task, method, seed, points, preset="demo", header="step,quantity,value,seconds"):
    run = folder / f"{task}-{method}-{preset}-seed{seed}"
    run.mkdir()
    settings = {"task": task, "attention": method, "preset": preset, "seed": seed}
    (run / "run.json").write_text(json.dumps({"settings": settings, "data": {}}))
    lines = [
        ",".join(map(str, (step, "validation accuracy", value, seconds)[: header.count(",") + 1]))
        for step, value, seconds in points
    ]
    (run / "curves.csv").write_text("\n".join([header, *lines]) + "\n")


def test_a_panel_per_task_and_a_line_per_method(tmp_path, drawn):
    add_run(tmp_path, "text", "softmax", 0, [(10, 0.5, 1.0), (20, 0.6, 2.0)])
    add_run(tmp_path, "text", "softmax", 1, [(10, 0.7, 3.0), (20, 0.8, 4.0), (30, 0.9, 5.0)])
    add_run(tmp_path, "text", "nystrom", 0, [(10, 0.4, 1.0)])
    add_run(tmp_path, "listops", "nystrom", 0, [(10, 0.2, 1.0)])
    draw_lra_curves(tmp_path, tmp_path / "curves.png")
    panels = drawn[0].axes
    assert [axes.get_title() for axes in panels] == ["listops", "text"]
    assert [line.get_label() for line in panels[0].lines] == ["nystrom"]
    lines = {line.get_label(): line for line in panels[1].lines}
    # The mean of both seeds, as far as both have come.
    assert lines["softmax"].get_xdata() == pytest.approx([2.0, 3.0])
    assert lines["softmax"].get_ydata() == pytest.approx([60.0, 70.0])
    assert lines["nystrom"].get_color() == panels[0].lines[0].get_color()
    assert lines["nystrom"].get_color() != lines["softmax"].get_color()


def test_presets_are_told_apart_where_there_are_several(tmp_path, drawn):
    for preset in ("demo", "skyformer"):
        add_run(tmp_path, "text", "softmax", 0, [(10, 0.5, 1.0)], preset=preset)
    draw_lra_curves(tmp_path, tmp_path / "curves.png")
    assert [line.get_label() for line in drawn[0].axes[0].lines] == ["softmax (demo)", "softmax (skyformer)"]


def test_a_picture_is_written(tmp_path):
    add_run(tmp_path, "text", "softmax", 0, [(10, 0.5, 1.0)])
    draw_lra_curves(tmp_path, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no run with a validation accuracy"):
        draw_lra_curves(tmp_path, tmp_path / "curves.png")
    add_run(tmp_path, "text", "softmax", 0, [(10, 0.5, 1.0)], header="step,quantity,value")
    with pytest.raises(ValueError, match=r"curves\.csv has no seconds"):
        draw_lra_curves(tmp_path, tmp_path / "curves.png")
