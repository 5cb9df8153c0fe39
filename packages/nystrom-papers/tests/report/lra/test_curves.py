"""Validation accuracy over time: a panel per task, a line per method, the mean of its seeds."""

import json
import math

import pytest

from nystrom_papers.report.lra.curves import draw_lra_curves, gather_curves
from nystrom_papers.report.printed import LRA_CLASSES


def add_run(folder, task, method, seed, points, preset="demo", header="step,quantity,value,seconds", **more):
    start = ["pretrained"] if more.get("model") else []
    positions = [str(more["positions"])] if more.get("positions") else []
    run = folder / "-".join([task, method, preset, *start, *positions, f"seed{seed}"])
    run.mkdir()
    settings = {"task": task, "attention": method, "preset": preset, "seed": seed} | more
    (run / "run.json").write_text(json.dumps({"settings": settings, "data": {}}))
    lines = [
        ",".join(map(str, (step, "validation accuracy", value, seconds)[: header.count(",") + 1]))
        for step, value, seconds in points
    ]
    (run / "curves.csv").write_text("\n".join([header, *lines]) + "\n")


def test_a_panel_per_task_and_a_line_per_method(tmp_path, drawn):
    add_run(tmp_path, "text", "softmax", 0, [(10, 0.5, 1.0), (20, 0.6, 2.0)])
    add_run(tmp_path, "text", "softmax", 1, [(10, 0.7, 3.0), (20, 0.8, 4.0), (30, 0.9, 5.0)])
    add_run(tmp_path, "text", "nystrom", 0, [(10, 0.4, 1.0), (20, 0.4, 2.0)])
    add_run(tmp_path, "listops", "nystrom", 0, [(10, 0.2, 1.0), (20, 0.2, 2.0)])
    draw_lra_curves(tmp_path, tmp_path / "curves.png")
    panels = drawn[0].axes
    assert [axes.get_title() for axes in panels] == ["listops", "text"]
    assert [line.get_label() for line in panels[0].lines] == ["nystrom", "chance"]
    lines = {line.get_label(): line for line in panels[1].lines}
    # The mean of both seeds, up to the last step of the shorter run.
    assert lines["softmax"].get_xdata() == pytest.approx([2.0, 3.0])
    assert lines["softmax"].get_ydata() == pytest.approx([60.0, 70.0])
    assert lines["nystrom"].get_color() == panels[0].lines[0].get_color()
    assert lines["nystrom"].get_color() != lines["softmax"].get_color()


def test_seeds_that_share_no_two_steps_raise(tmp_path, drawn):
    for seed, every in enumerate((100, 70)):
        add_run(tmp_path, "text", "softmax", seed, [(step, 0.5, 1.0) for step in range(every, 701, every)])
    says = r"seeds of softmax on text share fewer than two steps \(they have 100, 200, ..., 700 and 70, 140, ..., 700\)"
    with pytest.raises(ValueError, match=says):
        draw_lra_curves(tmp_path, tmp_path / "curves.png")
    assert not drawn


def test_where_a_seed_diverged_there_is_neither_line_nor_band(tmp_path, drawn):
    losses = {0: [1.8, 1.6, 1.4, 1.2], 1: [1.8, "inf", "nan", 1.7]}
    for seed, values in losses.items():
        add_run(tmp_path, "text", "softmax", seed, [])
        lines = [f"{10 * place},validation loss,{value},{place}\n" for place, value in enumerate(values, 1)]
        with (tmp_path / f"text-softmax-demo-seed{seed}" / "curves.csv").open("a") as file:
            file.writelines(lines)
    add_run(tmp_path, "text", "linear", 0, [])
    with (tmp_path / "text-linear-demo-seed0" / "curves.csv").open("a") as file:
        file.write("10,validation loss,1.9,1\n20,validation loss,1.8,2\n")
    draw_lra_curves(tmp_path, tmp_path / "curves.png", quantity="loss", over="steps")
    (axes,) = drawn[0].axes
    (line,) = (line for line in axes.lines if line.get_label() == "softmax")
    assert list(line.get_ydata()) == pytest.approx([1.8, math.nan, math.nan, 1.45], nan_ok=True)
    (band,) = axes.collections
    corners = {tuple(map(float, corner)) for path in band.get_paths() for corner in path.vertices}
    assert {x for x, _ in corners} == {10, 40}
    assert {y for x, y in corners if x == 40} == {1.2, 1.7}
    said = " ".join(drawn[0].get_supxlabel().split())
    assert said == "no line where a value is not finite: softmax on text (1 of 2 seeds)"


def test_an_axis_begins_at_zero_and_chance_has_a_line(tmp_path, drawn):
    add_run(tmp_path, "pathfinder", "softmax", 0, [(10, 0.50, 1.0), (20, 0.52, 2.0)])
    draw_lra_curves(tmp_path, tmp_path / "curves.png")
    (axes,) = drawn[0].axes
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] > 52
    assert {tuple(line.get_ydata()) for line in axes.lines if line.get_label() == "chance"} == {(50.0, 50.0)}
    assert LRA_CLASSES["pathfinder"] == 2


def test_a_run_that_was_evaluated_once_is_no_curve(tmp_path, drawn):
    add_run(tmp_path, "text", "softmax", 0, [(10, 0.5, 1.0)])
    with pytest.raises(ValueError, match="no run with two values"):
        draw_lra_curves(tmp_path, tmp_path / "curves.png")
    add_run(tmp_path, "listops", "softmax", 0, [(10, 0.5, 1.0), (20, 0.5, 2.0)])
    draw_lra_curves(tmp_path, tmp_path / "curves.png")
    assert [axes.get_title() for axes in drawn[0].axes] == ["listops"]


def test_many_sizes_of_a_method_look_different_and_are_named_in_their_order(tmp_path, drawn):
    sizes = [16, 32, 64, 128, 256, 512]
    points = [(step, 0.5, float(step)) for step in range(1, 61)]
    for task, size in [*(("listops", size) for size in sizes[3:]), *(("text", size) for size in sizes)]:
        add_run(tmp_path, task, f"nystrom-{size}", 0, points)
    draw_lra_curves(tmp_path, tmp_path / "curves.png")
    lines = drawn[0].axes[1].lines[: len(sizes)]
    assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}) == len(sizes)
    assert all(line.get_marker() not in ("", "None") for line in lines)
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [*(f"nystrom-{size}" for size in sizes), "chance"]


def test_gathered_curves_draw_the_same_figure(tmp_path, drawn):
    for seed in (0, 1):
        add_run(tmp_path, "text", "softmax", seed, [(10, 0.1 + seed, 1.5), (20, 1 / 3, 2.0)])
    gather_curves(tmp_path, tmp_path / "gathered.csv")
    assert (tmp_path / "gathered.csv").read_text().splitlines()[:2] == [
        "run,step,quantity,value,seconds",
        "text-softmax-demo-seed0,10,validation accuracy,0.1,1.5",
    ]
    for source in (tmp_path, tmp_path / "gathered.csv"):
        draw_lra_curves(source, tmp_path / "curves.png")
    runs, gathered = (figure.axes[0].lines[0].get_ydata() for figure in drawn)
    assert list(runs) == list(gathered)
    assert not any(map(math.isnan, runs))


def test_runs_of_several_sources_are_drawn_together_and_none_of_them_twice(tmp_path, drawn):
    points = {seed: [(10, 0.1 * seed, 1.5), (20, 0.2 * seed, 2.0)] for seed in (1, 2, 3)}
    for seed, name in ((1, "one"), (2, "one"), (3, "other")):
        (tmp_path / name).mkdir(exist_ok=True)
        add_run(tmp_path / name, "text", "softmax", seed, points[seed])
    gather_curves(tmp_path / "one", tmp_path / "one.csv")
    for sources in ([tmp_path / "one.csv", tmp_path / "other"], [tmp_path / "one", tmp_path / "other"]):
        draw_lra_curves(sources, tmp_path / "curves.png")
    for figure in drawn:
        assert list(figure.axes[0].lines[0].get_ydata()) == pytest.approx([20, 40])
    for twice in ("one", "one.csv"):
        with pytest.raises(ValueError, match="both hold the run text-softmax-demo-seed1"):
            draw_lra_curves([tmp_path / "one.csv", tmp_path / twice], tmp_path / "curves.png")
    with pytest.raises(ValueError, match="source is an empty list; expected the folder of"):
        draw_lra_curves([], tmp_path / "curves.png")


@pytest.mark.parametrize(
    ("name", "what"), [("nowhere.csv", "does not exist"), ("empty", "holds no run with two values")]
)
def test_a_source_that_adds_no_curve_is_named(tmp_path, name, what):
    (tmp_path / "good").mkdir()
    (tmp_path / "empty").mkdir()
    add_run(tmp_path / "good", "text", "softmax", 0, [(10, 0.1, 1.5), (20, 0.2, 2.0)])
    with pytest.raises(ValueError, match=f"{name} {what}.*; expected the folder of"):
        draw_lra_curves([tmp_path / "good", tmp_path / name], tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_runs_of_other_settings_in_two_folders_are_not_seeds_of_one_method(tmp_path):
    for seed, name in ((1, "one"), (2, "other")):
        (tmp_path / name).mkdir()
        points = [(10, 0.5, 1.0), (20, 0.5, 2.0)]
        add_run(tmp_path / name, "text", "softmax", seed, points, learning_rate=seed, device=name)
    with pytest.raises(ValueError, match=r"one/text-softmax-demo-seed1 and .*seed2 differ in learning_rate"):
        draw_lra_curves([tmp_path / "one", tmp_path / "other"], tmp_path / "curves.png")


def test_gathered_curves_know_methods_and_presets_with_numbers(tmp_path, drawn):
    for preset in ("modern-small", "nystromformer", "nystromformer-1000"):
        add_run(tmp_path, "text", "nystrom-64", 0, [(10, 0.5, 1.0), (20, 0.5, 2.0)], preset=preset)
    gather_curves(tmp_path, tmp_path / "gathered.csv")
    draw_lra_curves(tmp_path / "gathered.csv", tmp_path / "curves.png")
    assert [line.get_label() for line in drawn[0].axes[0].lines][:3] == [
        "nystrom-64 (modern-small)",
        "nystrom-64 (nystromformer)",
        "nystrom-64 (nystromformer-1000)",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n", "line 1 is 'a,b'; expected run,step,quantity,value,seconds"),
        ("run,step,quantity,value,seconds\nx,1,validation accuracy,high,2\n", "line 2 is 'x,1,validation accuracy,hi"),
        ("run,step,quantity,value,seconds\nmine,1,validation accuracy,0.5,2\n", "names the run 'mine'"),
    ],
)
def test_another_file_of_curves_raises_by_line(content, message, tmp_path):
    (tmp_path / "gathered.csv").write_text(content)
    with pytest.raises(ValueError, match=message):
        draw_lra_curves(tmp_path / "gathered.csv", tmp_path / "curves.png")


@pytest.mark.parametrize("preset", ["demo", "modern-small", "skyformer-1000"])
def test_an_encoder_that_was_pretrained_and_another_length_are_lines_of_their_own(preset, tmp_path, drawn):
    points = [(10, 0.5, 1.0), (20, 0.5, 2.0)]
    for more in ({}, {"model": "runs/a/best"}, {"positions": 512}, {"model": "runs/a/best", "positions": 512}):
        add_run(tmp_path, "text", "nystrom-64", 0, points, preset=preset, **more)
    gather_curves(tmp_path, tmp_path / "gathered.csv")
    for source in (tmp_path, tmp_path / "gathered.csv"):
        draw_lra_curves(source, tmp_path / "curves.png")
    said = {f"nystrom-64 ({preset}{more})" for more in ("", ", pretrained", ", 512", ", pretrained, 512")}
    for figure in drawn:
        assert {line.get_label() for line in figure.axes[0].lines} == said | {"chance"}


def test_a_run_without_seconds_raises(tmp_path):
    add_run(tmp_path, "text", "softmax", 0, [(10, 0.5, 1.0)], header="step,quantity,value")
    with pytest.raises(ValueError, match=r"curves\.csv has no seconds"):
        draw_lra_curves(tmp_path, tmp_path / "curves.png")


def test_losses_and_norms_of_gradients_are_drawn_too_over_time_or_steps(tmp_path, drawn):
    add_run(tmp_path, "text", "softmax", 0, [(10, 0.5, 1.5), (20, 0.6, 2.0)])
    with (tmp_path / "text-softmax-demo-seed0" / "curves.csv").open("a") as file:
        for name in ("validation loss", "gradient norm"):
            file.writelines(f"{step},{name},{value},{step / 10}\n" for step, value in ((5, 2.0), (15, 8.0)))
    gather_curves(tmp_path, tmp_path / "gathered.csv")
    for source in (tmp_path, tmp_path / "gathered.csv"):
        draw_lra_curves(source, tmp_path / "curves.png", quantity="loss", over="steps")
        draw_lra_curves(source, tmp_path / "curves.png", quantity="gradient-norm")
        loss, norm = (figure.axes[0] for figure in drawn[-2:])
        assert list(loss.lines[0].get_xdata()) == [5, 15]
        assert list(loss.lines[0].get_ydata()) == [2.0, 8.0]
        assert [line.get_label() for line in loss.lines] == ["softmax"]
        assert list(norm.lines[0].get_xdata()) == [0.5, 1.5]
        assert norm.get_yscale() == "log"
    with pytest.raises(ValueError, match="quantity"):
        draw_lra_curves(tmp_path, tmp_path / "curves.png", quantity="norm")


def test_runs_that_learn_no_class_of_a_task_are_left_out(tmp_path, drawn):
    add_run(tmp_path, "text", "softmax", 0, [(10, 0.5, 1.5), (20, 0.6, 2.0)])
    add_run(tmp_path, "text", "linear", 0, [(10, 0.5, 1.5), (20, 0.6, 2.0)], mask_share=0.15)
    finetuned = tmp_path / "finetune-sst2-seed0"
    finetuned.mkdir()
    (finetuned / "run.json").write_text(json.dumps({"settings": {"task": "sst2", "seed": 0}, "data": {}}))
    (finetuned / "curves.csv").write_text("step,quantity,value,seconds\n1,validation accuracy,0.5,1\n")
    gather_curves(tmp_path, tmp_path / "gathered.csv")
    for source in (tmp_path, tmp_path / "gathered.csv"):
        draw_lra_curves(source, tmp_path / "curves.png")
        assert [line.get_label() for line in drawn[-1].axes[0].lines] == ["softmax", "chance"]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"settings": []}'])
def test_a_run_that_is_not_described_is_named(content, tmp_path):
    (tmp_path / "text-softmax-demo-seed0").mkdir()
    (tmp_path / "text-softmax-demo-seed0" / "run.json").write_text(content)
    with pytest.raises(
        ValueError, match=r"text-softmax-demo-seed0.run\.json (is not valid JSON|holds a list|does not describe a run)"
    ):
        draw_lra_curves(tmp_path, tmp_path / "curves.png")
