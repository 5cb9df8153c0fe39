"""Faults around a run end in one line that says how to continue, and cost only the steps since a checkpoint."""

import os
import resource
import shutil
from contextlib import contextmanager

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from torch.testing import assert_close

from nystrom.whole_files import NotWritten
from nystrom_lab.config import EvaluateOptions
from nystrom_lab.training.run_folder import RunFolder
from nystrom_lab.training.scoring import evaluate
from nystrom_lab.whole_folders import write_sums


@contextmanager
def full_disk(free):
    """Files cannot grow beyond a limit: the system calls then fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def change_a_byte(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors"])
def test_a_damaged_checkpoint_is_passed_over_by_name(whole, small_run, tmp_path, capsys, weights, curves, name):
    run = shutil.copytree(whole, tmp_path / "run", ignore=unfinished)
    change_a_byte(run / "checkpoint-12" / name)
    small_run(run, resume=True)
    printed = capsys.readouterr().out
    assert f"warning: {run / 'checkpoint-12'} is skipped: {name} is damaged." in printed
    assert "Continuing after step 9." in printed
    # The step is taken again, and what was damaged stays.
    assert (run / "checkpoint-12-before" / name).is_file()
    assert_close(weights(run), weights(whole), rtol=0, atol=0)
    assert curves(run) == curves(whole)


def unfinished(folder, names):
    """Files that a copy of a run leaves out, so that it goes on."""
    return {"rows.csv"} & set(names)


class Mark:
    """Leaves a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return (os.mkdir, (str(self.folder),))


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_pickled_code_in_a_checkpoint_is_refused_in_one_line(whole, small_run, tmp_path, name):
    run = shutil.copytree(whole, tmp_path / "run", ignore=unfinished)
    # The files that a run with steps left reads.
    shutil.rmtree(run / "checkpoint-12")
    last = RunFolder(run).last_step()
    file = run / f"checkpoint-{last}" / name
    torch.save(Mark(tmp_path / "mark"), file)
    # Somebody who wants it to be read would do this.
    write_sums(file.parent)
    with pytest.raises(ValueError, match=r"holds pickled code, which is never run") as error:
        small_run(run, resume=True)
    assert str(error.value).startswith(f"{file} holds")
    assert f"delete {file.parent} and start" in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "mark").exists()


@pytest.mark.long
@pytest.mark.parametrize("free", [100_000, 500_000])
def test_a_full_disk_ends_a_run_in_one_line_and_leaves_no_half_checkpoint(
    whole, small_run, tmp_path, weights, curves, free
):
    run = tmp_path / "run"
    # The weights take more than the first limit, the state of the optimizer more than the second.
    with full_disk(free), pytest.raises(NotWritten, match="make room") as error:
        small_run(run)
    assert str(error.value).startswith(f"{run / 'checkpoint-3'} cannot be written (")
    assert str(error.value).endswith("make room for it, then continue with --resume, from step 0.")
    assert "\n" not in str(error.value)
    assert not (run / "checkpoint-3").exists()
    assert_close(weights(small_run(run, resume=True)), weights(whole), rtol=0, atol=0)
    assert curves(run) == curves(whole)


def test_a_full_disk_at_the_end_costs_no_steps(whole, small_run, tmp_path, capsys):
    run = shutil.copytree(whole, tmp_path / "run", ignore=unfinished)
    with full_disk(250_000), pytest.raises(NotWritten, match=r"best cannot be written .*continue with --resume\.$"):
        small_run(run, resume=True)
    small_run(run, resume=True)
    assert capsys.readouterr().out.count("Continuing after step 12.") == 2
    best = [load_file(of / "best" / "model.safetensors") for of in (run, whole)]
    assert_close(best[0], best[1], rtol=0, atol=0)


def test_a_damaged_model_is_not_scored(whole, data, tmp_path):
    best = shutil.copytree(whole / "best", tmp_path / "best")
    file = best / "model.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a.* safetensors file") as error:
        evaluate(EvaluateOptions("listops", model=best, data=data, device="cpu"))
    assert "\n" not in str(error.value)


def test_a_bit_of_a_saved_model_that_flipped_is_found_before_it_is_used(whole, data, small_run, tmp_path):
    best = shutil.copytree(whole / "best", tmp_path / "best")
    # A card is there to be edited.
    (best / "README.md").write_text("mine")
    assert evaluate(EvaluateOptions("listops", model=best, data=data, device="cpu")).value >= 0
    change_a_byte(best / "model.safetensors")
    for use in (
        lambda: evaluate(EvaluateOptions("listops", model=best, data=data, device="cpu")),
        lambda: small_run(tmp_path / "next", model=best, attention=None, options=None, preset=None),
    ):
        with pytest.raises(ValueError, match=r"best: model.safetensors is damaged\. Restore it .*complete\.json"):
            use()
    # One of an older version, or that somebody has changed.
    (best / "complete.json").unlink()
    assert evaluate(EvaluateOptions("listops", model=best, data=data, device="cpu")).value >= 0


@pytest.mark.parametrize(
    "harm",
    [
        lambda best: change_a_byte(best / "model.safetensors"),
        lambda best: (best / "config.json").unlink(),
        lambda best: (best / "complete.json").unlink(),
        shutil.rmtree,
    ],
)
def test_a_finished_run_whose_model_is_damaged_is_refused_and_can_be_finished_again(whole, small_run, tmp_path, harm):
    run = shutil.copytree(whole, tmp_path / "run")
    harm(run / "best")
    with pytest.raises(
        ValueError, match=r"run is finished, but model .*best: .* is (damaged|missing)\. Restore"
    ) as error:
        small_run(run, resume=True)
    assert "\n" not in str(error.value)
    # Do as the message says.
    for name in ("best", "rows.csv"):
        if (run / name).exists():
            (run / name).rename(tmp_path / name)
    small_run(run, resume=True)
    best = [load_file(of / "best" / "model.safetensors") for of in (run, whole)]
    assert_close(best[0], best[1], rtol=0, atol=0)


@pytest.mark.parametrize("file", ["train_tokens.npy", "test_tokens.npy"])
def test_a_bit_of_the_data_that_flipped_is_found_before_they_are_used(whole, data, small_run, tmp_path, file):
    damaged = shutil.copytree(data, tmp_path / "damaged")
    change_a_byte(damaged / file)
    for use in (
        lambda: small_run(tmp_path / "run", data=damaged),
        lambda: evaluate(EvaluateOptions("listops", model=whole / "best", data=damaged, device="cpu")),
    ):
        with pytest.raises(ValueError, match=rf"{file} has SHA-256 \w+ instead of \w+: the prepared data are damaged"):
            use()
    assert not (tmp_path / "run").exists()


def test_two_trainings_do_not_share_a_folder(whole, small_run):
    with (
        FileLock(whole / ".lock"),
        pytest.raises(ValueError, match=r"is in use by another training: wait for it, or choose another folder"),
    ):
        small_run(whole, resume=True)


def test_a_run_that_never_started_leaves_no_folder(small_run, tmp_path):
    with pytest.raises(ValueError, match="batch_size is 64 but data"):
        small_run(tmp_path / "runs" / "new", batch_size=64)
    assert not (tmp_path / "runs").exists()
    # A folder that existed before stays.
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="batch_size is 64 but data"):
        small_run(tmp_path / "mine", batch_size=64)
    assert list((tmp_path / "mine").iterdir()) == []
