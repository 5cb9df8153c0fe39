"""A run prints plain lines at the points of its curves, and says between them how far it is."""

import re
from types import SimpleNamespace

import pytest
from transformers import TrainerState

from nystrom import progress
from nystrom_lab.training.run_progress import RunProgress, line_of


def test_a_piped_log_holds_plain_lines_with_numbers(small_run, tmp_path, capsys):
    small_run(tmp_path / "run", steps=6)
    printed = capsys.readouterr()
    assert not re.search(r"[\r\x1b'{}]", printed.out + printed.err)
    number, end = r"\d+(?:\.\d+)?(?:e-\d+)?", r", \d+ s, (?:about \d+ s left, )?peak memory \d+ MB$"
    for middle, steps in (
        (f"train loss {number}, learning rate {number}, gradient norm {number}", "123456"),
        (rf"validation loss {number}, validation accuracy \d+\.\d%", "36"),
    ):
        assert re.findall(rf"^step (\d) of 6: {middle}{end}", printed.out, re.MULTILINE) == [*steps]


@pytest.mark.long
def test_a_finished_run_that_is_resumed_reports_no_loss(whole, small_run, tmp_path, capsys):
    run = small_run(tmp_path / "run", steps=3)
    capsys.readouterr()
    small_run(run, steps=3, resume=True)
    assert "loss" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("logs", "line"),
    [
        (
            {"loss": 2.30149, "learning_rate": 4e-4, "epoch": 0.1, "seconds": 12.3, "megabytes": 811.6},
            "step 20 of 700: train loss 2.301, learning rate 0.0004, 12 s, about 7 min left, peak memory 812 MB",
        ),
        (
            {"eval_loss": 0.5, "eval_accuracy": 0.3125, "eval_runtime": 1.0, "seconds": 3.0, "megabytes": 0.0},
            "step 20 of 700: validation loss 0.5, validation accuracy 31.2%, 3 s, about 2 min left",
        ),
        ({"train_runtime": 1.0, "train_loss": 0.0, "seconds": 3.0, "megabytes": 1.0}, ""),
    ],
)
def test_a_line_says_where_the_run_is(logs, line):
    assert line_of(logs, TrainerState(global_step=20, max_steps=700)) == line


@pytest.mark.parametrize(
    ("step", "seconds", "left"), [(1, 0.1, ", about 10 s left"), (50, 9000.0, ", about 2.5 h left"), (100, 9.0, "")]
)
def test_a_line_says_the_time_that_remains_at_the_pace_until_now(step, seconds, left):
    line = line_of({"loss": 1.0, "seconds": seconds, "megabytes": 0.0}, TrainerState(global_step=step, max_steps=100))
    assert line.partition(" s")[2] == left


def test_between_the_lines_a_run_says_how_far_it_is(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    state = TrainerState(global_step=20, max_steps=700, is_world_process_zero=True)
    logs = {"loss": 2.3, "learning_rate": 1e-3, "seconds": 1.0, "megabytes": 1.0}
    run = RunProgress()
    # A run that is resumed at step 20.
    run.on_train_begin(None, state, None)
    for step in range(21, 71):
        now[0] += 1
        state.global_step = step
        run.on_step_end(None, state, None)
        if step == 60:
            run.on_log(None, state, None, logs=logs)
            said = line_of(logs, state)
    for _ in range(5):
        now[0] += 5
        run.on_prediction_step(None, state, None, eval_dataloader=range(5))
    run.on_evaluate(None, state, None)
    run.on_train_end(None, state, None)
    captured = capsys.readouterr()
    assert captured.out == f"{said}\n"
    assert captured.err.splitlines() == [
        "training: 30 of 700 steps, 10 s, about 11 min left",
        "training: 50 of 700 steps, 30 s, about 11 min left",
        "validation: 3 of 5 batches, 10 s, about 7 s left",
    ]


def test_other_processes_than_the_first_say_nothing(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    state, run = TrainerState(global_step=0, max_steps=9, is_world_process_zero=False), RunProgress()
    run.on_train_begin(None, state, None)
    now[0] += 60
    run.on_step_end(None, state, None)
    run.on_log(None, state, None, logs={"loss": 2.3, "seconds": 1.0, "megabytes": 1.0})
    run.on_train_end(None, state, None)
    assert capsys.readouterr() == ("", "")
