"""A run that was interrupted at any point continues to the weights and curves of an uninterrupted one."""

import os
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from nystrom_lab.data.lra.listops.task import prepare_listops

SHORT = {"steps": 6, "warmup_steps": 2, "evaluate_every": 3}


@pytest.mark.long
def test_a_killed_run_continues_to_the_same_result(whole, small_run, data, tmp_path, weights, curves):
    script = tmp_path / "killed.py"
    # The process waits in step 8 to be killed; on a loaded machine it might otherwise finish first.
    script.write_text(f"""
import time
from pathlib import Path
from nystrom_lab.training.run_settings import train_options
from nystrom_lab.training.train import train
from nystrom_lab.training.arena import EncoderTrainer
inner = EncoderTrainer.training_step
def training_step(self, *given):
    while self.state.global_step == 7:
        time.sleep(1)
    return inner(self, *given)
EncoderTrainer.training_step = training_step
train(train_options("listops", options={{"num_landmarks": 8}}, preset="demo", data=Path({str(data)!r}),
                    to=Path({str(tmp_path / "killed")!r}), steps=12, warmup_steps=2, batch_size=8,
                    evaluate_every=3, log_every=1, device="cpu", threads=1))
""")
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            deadline = time.monotonic() + 600
            while not (tmp_path / "killed" / "checkpoint-6" / "complete.json").exists():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "killed" / "best").exists()
    killed = small_run(tmp_path / "killed", resume=True)
    assert_close(weights(killed), weights(whole), rtol=0, atol=0)
    assert curves(killed) == curves(whole)
    best = [load_file(run / "best" / "model.safetensors") for run in (killed, whole)]
    assert_close(best[0], best[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        pytest.param(2, {}, id="before its first checkpoint"),
        pytest.param(8, {"attention": "skyformer", "options": {"num_landmarks": 6}}, id="with random landmarks"),
        pytest.param(5, SHORT | {"pooled_norm": "batch"}, id="with a pooled norm"),
        pytest.param(5, SHORT | {"denoise": 1.0, "augment": True}, id="denoised"),
        pytest.param(5, SHORT | {"mask_share": 0.1, "augment": True}, id="masked"),
        pytest.param(5, SHORT | {"mask_share": 0.1, "augment": True, "accumulation": 2}, id="masked in parts"),
    ],
)
@pytest.mark.long
def test_an_interrupted_run_ends_as_one_of_one_sitting(
    small_run, interrupted, tmp_path, weights, curves, step, changes
):
    whole, run = small_run(tmp_path / "whole", **changes), tmp_path / "run"
    interrupted(step, small_run, run, **changes)
    small_run(run, resume=True, **changes)
    last = changes.get("steps", 12)
    assert_close(weights(run, last), weights(whole, last), rtol=0, atol=0)
    assert curves(run) == curves(whole)
    best = [load_file(folder / "best" / "model.safetensors") for folder in (run, whole)]
    assert_close(best[0], best[1], rtol=0, atol=0)


def test_an_interrupted_run_can_be_resumed(whole, small_run, tmp_path, capsys, weights, curves, interrupted):
    interrupted(8, small_run, tmp_path / "run")
    assert "Stopped in step 8 of 12; continue with --resume, from step 6." in capsys.readouterr().out
    assert [step for step, quantity, _ in curves(tmp_path / "run") if quantity == "train loss"] == [1, 2, 3, 4, 5, 6]
    run = small_run(tmp_path / "run", resume=True)
    assert "Continuing after step 6." in capsys.readouterr().out
    assert_close(weights(run), weights(whole), rtol=0, atol=0)
    assert curves(run) == curves(whole)


def test_a_half_written_checkpoint_is_passed_over(whole, small_run, tmp_path, capsys, weights, curves):
    run = small_run(tmp_path / "run")
    (run / "rows.csv").unlink()
    last = run / "checkpoint-12" / "model.safetensors"
    os.truncate(last, last.stat().st_size // 2)
    small_run(run, resume=True)
    assert "Continuing after step 9." in capsys.readouterr().out
    assert_close(weights(run), weights(whole), rtol=0, atol=0)
    assert curves(run) == curves(whole)


def test_a_resumed_run_knows_its_data(whole, small_run, tmp_path, monkeypatch, weights, interrupted):
    monkeypatch.chdir(tmp_path)
    interrupted(5, small_run, tmp_path / "run")
    assert_close(weights(small_run(tmp_path / "run", resume=True, data=None)), weights(whole), rtol=0, atol=0)
    assert not (tmp_path / "data").exists()


@pytest.mark.long
def test_a_run_folder_may_move(whole, small_run, tmp_path, interrupted):
    interrupted(8, small_run, tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    run = small_run(tmp_path / "moved", resume=True)
    best = [load_file(folder / "best" / "model.safetensors") for folder in (run, whole)]
    assert_close(*best, rtol=0, atol=0)


def test_a_resumed_run_keeps_its_settings(small_run, tmp_path, data):
    run = small_run(tmp_path / "run", steps=3, warmup_steps=0)
    with pytest.raises(ValueError, match="holds a run: continue it with --resume"):
        small_run(run)
    with pytest.raises(ValueError, match="steps is 12 but was 3; warmup_steps is 2 but was 0"):
        small_run(run, resume=True)
    other = prepare_listops(tmp_path / "other", train=48, val=20, test=30, seed=1, min_length=5, max_length=41)
    with pytest.raises(ValueError, match="whose data were different"):
        small_run(run, resume=True, steps=3, warmup_steps=0, data=other)
