"""Jobs of a cluster do the work of a grid once, go on where they were, and are found again."""

import importlib.util
import os
import signal
import stat
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from nystrom_lab.config import NO_SLURM, Slurm
from nystrom_lab.training.grid import scheduler
from nystrom_lab.training.grid import slurm as slurm_module
from nystrom_lab.training.grid.run_grid import status_lines
from nystrom_lab.training.grid.scheduler import Work
from nystrom_lab.training.grid.slurm import PRIVATE, Jobs, alive_jobs, queue

pytest.importorskip("submitit")


@pytest.fixture
def works(tmp_path, monkeypatch):
    """Makes a piece of work by name: one that writes a file once another file is there, and counts its starts."""
    spec = importlib.util.spec_from_file_location("cluster_work", Path(__file__).with_name("cluster_work.py"))
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "cluster_work", module)
    spec.loader.exec_module(module)

    def make(to: Path, *names: str) -> list[Work]:
        to.mkdir(exist_ok=True)
        acts = {name: module.fail if name == "bad" else module.write for name in names}
        return [
            Work(name, act, [str(to), name], lambda name=name: "well done" * (to / f"{name}.done").is_file())
            for name, act in acts.items()
        ]

    return make


def jobs(to: Path, slurm: Slurm = NO_SLURM) -> Jobs:
    return Jobs(to, slurm, cpus=1, at_once=None, seconds=0.2)


def wait_for(condition) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_each_piece_has_a_job_that_runs_once_and_what_fails_is_named(cluster, works, tmp_path, capsys):
    to = tmp_path / "to"
    pieces = works(to, "one", "bad", "two")
    (to / "go").touch()
    (failure,) = jobs(to).run(pieces)
    assert (failure.name, failure.log) == ("bad", to / "bad.log")
    assert failure.reason == "job 2 ended with FAILED: ValueError: this cannot be done"
    assert "one: well done (" in capsys.readouterr().out
    assert (to / "one.log").read_text().startswith("one starts\n")
    assert {name: job for name, (job, _) in queue(to).items()} == {"one": "1", "bad": "2", "two": "3"}
    # The same command skips what is done.
    assert len(jobs(to).run(pieces)) == 1
    assert "one: finished before: well done" in capsys.readouterr().out
    assert queue(to)["bad"][0] == "4"
    assert (to / "one.log").read_text().count("starts") == 1


def test_as_many_jobs_run_at_a_time_as_were_asked_for(cluster, works, tmp_path):
    to = tmp_path / "to"
    pieces = works(to, "one", "two", "three", "four")
    (to / "go").touch()
    assert Jobs(to, NO_SLURM, cpus=1, at_once=2, seconds=0.2).run(pieces) == []
    scripts = [(to / PRIVATE / f"{job}_submission.sh").read_text().partition("--dependency=") for job in (1, 2, 3, 4)]
    assert [rest.partition("\n")[0] for *_, rest in scripts] == ["", "", "afterany:1", "afterany:2"]


def test_only_the_user_may_enter_the_folder_of_the_pickles(cluster, works, tmp_path):
    to = tmp_path / "to"
    (to / PRIVATE).mkdir(parents=True, mode=0o755)
    (to / "go").touch()
    jobs(to).run(works(to, "one"))
    assert stat.S_IMODE((to / PRIVATE).stat().st_mode) == 0o700


def test_jobs_that_outlive_their_command_are_waited_for_and_not_submitted_again(
    cluster, works, tmp_path, capsys, monkeypatch
):
    to = tmp_path / "to"
    pieces = works(to, "one", "two")

    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(scheduler, "time", SimpleNamespace(sleep=interrupt))
        with pytest.raises(KeyboardInterrupt):
            jobs(to).run(pieces)
    assert "The jobs go on" in capsys.readouterr().out
    wait_for(lambda: all((to / f"{work.name}.log").is_file() for work in pieces))
    assert status_lines(to)[0].startswith("one: no checkpoint yet, job 1 RUNNING")
    # The controller is away for a moment.
    away = ValueError("SLURM does not answer (away).")
    answers = iter([queue(to), away, away])

    def lost(folder: Path) -> dict[str, tuple[str, str]]:
        if (answer := next(answers, None)) is away:
            raise away
        if answer is None:
            (to / "go").touch()
        return answer or queue(folder)

    waiting = jobs(to)
    assert alive_jobs(to) == ["1", "2"]
    monkeypatch.setattr(slurm_module, "queue", lost)
    assert waiting.run(pieces) == []
    printed = capsys.readouterr().out
    assert printed.count("SLURM does not answer (away). Waiting until it answers.") == 1
    assert "one: in job 1" in printed
    assert [(to / f"{work.name}.log").read_text().count("starts") for work in pieces] == [1, 1]


@pytest.mark.parametrize("state", ["CANCELLED", "NODE_FAIL", "TIMEOUT", "GONE"])
def test_a_job_that_the_cluster_ended_is_named_and_its_work_is_submitted_by_the_next_command(
    cluster, works, tmp_path, monkeypatch, state
):
    to = tmp_path / "to"

    def seen(folder: Path) -> dict[str, tuple[str, str]]:
        return {name: (job, state) for name, (job, _) in queue(folder).items() if state != "GONE"}

    with monkeypatch.context() as patch:
        patch.setattr(slurm_module, "queue", seen)
        (failure,) = jobs(to).run(works(to, "one"))
    assert failure.reason.startswith(f"job {'-' if state == 'GONE' else '1'} ended with {state}")
    wait_for((to / "one.pid").is_file)
    os.kill(int((to / "one.pid").read_text()), signal.SIGKILL)
    wait_for(lambda: queue(to)["one"] == ("1", "FAILED"))
    (to / "go").touch()
    assert jobs(to).run(works(to, "one")) == []
    assert queue(to)["one"][0] == "2"


@pytest.mark.parametrize(
    ("check", "says"),
    [
        (lambda: Slurm(time=0).check("slurm"), "slurm.time is 0"),
        (lambda: Slurm(timeouts=-1).check("slurm"), "slurm.timeouts is -1"),
        (lambda: Slurm(gpus=2).check("slurm"), "slurm.gpus is 2; expected 0 or 1"),
        (lambda: Slurm(memory=0).check("slurm"), "slurm.memory is 0"),
        (lambda: Slurm(partition="gpu").check("local"), "slurm.partition is 'gpu' but on is 'local': add --on slurm"),
        (lambda: NO_SLURM.device("cuda", "auto"), "device is 'cuda' but slurm.gpus is 0"),
        (lambda: Slurm(gpus=1).device("auto", "auto"), "choose bfloat16 or float32"),
        (lambda: status_lines(Path("none")), "holds no runs"),
    ],
)
def test_what_no_job_can_have_raises(check, says):
    with pytest.raises(ValueError, match=says):
        check()


def test_a_job_has_the_device_that_it_asks_for():
    NO_SLURM.check("local")
    assert Slurm(gpus=1).device("auto", "bfloat16") == "cuda"
    assert NO_SLURM.device("auto", "auto") == "cpu"


def test_a_partition_that_does_not_exist_raises_before_any_work(cluster, tmp_path):
    with pytest.raises(ValueError, match=r"--partition=none .*invalid partition specified: none"):
        jobs(tmp_path / "to", Slurm(partition="none"))


def test_where_there_is_no_slurm_or_no_submitit_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="there is no sbatch here"):
        jobs(tmp_path)
    monkeypatch.setattr(slurm_module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"submitit is not installed: pip install 'nystrom-lab\[cluster\]'"):
        jobs(tmp_path)


def test_a_controller_that_does_not_answer_is_named(cluster, tmp_path):
    (cluster / "silent").touch()
    (tmp_path / PRIVATE).mkdir()
    with pytest.raises(ValueError, match=r"SLURM does not answer \(slurm_load_jobs error: Unable to contact"):
        queue(tmp_path)
