import sys
import tarfile

import pytest
import torch

from nystrom_lab.cli.main import main
from tools.measure_gpu import STEPS, Step, measure, pack


def python(name, minutes, code, **more):
    return Step(name, minutes, (sys.executable, "-c", code, "{to}"), **more)


WRITE = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
(folder / "rows.csv").write_text(str(sys.argv[2:]))
"""


def test_steps_run_in_order_and_not_again(tmp_path, capsys):
    steps = [python("one", 1, WRITE), python("two", 1, WRITE)]
    assert measure(steps, tmp_path, minutes=10) == ([], [])
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["one", "two"]
    assert measure(steps, tmp_path, minutes=10) == ([], [])
    assert capsys.readouterr().out == ""


def test_a_step_that_fails_is_named_tried_again_and_does_not_stop_the_others(tmp_path):
    steps = [python("bad", 1, "raise SystemExit(3)"), python("good", 1, WRITE)]
    assert measure(steps, tmp_path, minutes=10) == (["bad"], [])
    assert (tmp_path / "good.done").exists()
    steps[0] = python("bad", 1, WRITE, resumes=("--resume",))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").touch()
    assert measure(steps, tmp_path, minutes=10) == ([], [])
    assert (tmp_path / "bad" / "rows.csv").read_text() == "['--resume']"


def test_a_folder_without_a_run_is_not_resumed(tmp_path):
    (tmp_path / "one").mkdir()
    assert measure([python("one", 1, WRITE, resumes=("--resume",))], tmp_path, minutes=10) == ([], [])
    assert (tmp_path / "one" / "rows.csv").read_text() == "[]"


def test_no_step_begins_that_would_not_end_in_time_but_a_shorter_one_does(tmp_path):
    steps = [python("long", 5, WRITE), python("short", 1, WRITE)]
    assert measure(steps, tmp_path, minutes=2) == ([], ["long"])
    assert (tmp_path / "short.done").exists()


STARTED = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).mkdir(); "


def test_a_step_that_hangs_is_interrupted_and_can_say_how_far_it_was(tmp_path, capsys):
    for minutes in (0.05, 0.2, 1):
        hangs = python("hangs", minutes, "import time; time.sleep(600)")
        assert measure([hangs], tmp_path, minutes=2) == (["hangs"], [])
        assert "hangs: out of time" in capsys.readouterr().out
        # On a busy machine the interpreter may not have begun, or not have ended: it says nothing then.
        if "KeyboardInterrupt" in (tmp_path / "hangs.log").read_text():
            return
    pytest.fail("it never said that it was interrupted")


def test_a_step_that_does_not_hear_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("tools.measure_gpu._GRACE", 0.1)
    deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " + STARTED + "time.sleep(60)"
    assert measure([python("deaf", 0.05, deaf)], tmp_path, minutes=1) == (["deaf"], [])


def test_no_step_goes_on_beyond_the_minutes_of_all(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr("tools.measure_gpu._run_for", lambda words, log, seconds: given.append(seconds))
    for minutes in (7, 40):
        measure([Step("one", 6, ())], tmp_path, minutes=minutes, clock=lambda: 0.0)
    assert given == [7 * 60, 9 * 60]


def test_rows_without_a_value_are_told_and_what_there_is_is_packed_after_each_step(tmp_path, capsys):
    rows = "method,n,value,note\nsoftmax,64,nan,out of memory\nlinear,64,2.0,\n"
    code = WRITE.replace("str(sys.argv[2:])", repr(rows))
    packed = []
    measure([python("one", 1, code), python("two", 1, WRITE)], tmp_path, minutes=10, after=lambda: packed.append(1))
    assert "  softmax, n=64: out of memory\n" in capsys.readouterr().out
    assert packed == [1, 1]


def test_the_archive_holds_rows_and_logs_but_no_models(tmp_path):
    to = tmp_path / "gpu"
    measure([python("one", 1, WRITE)], to, minutes=10)
    (to / "one" / "checkpoint-3").mkdir()
    for name in ("model.safetensors", "checkpoint-3/state.json"):
        (to / "one" / name).touch()
    pack(to, tmp_path / "gpu.tar.gz")
    with tarfile.open(tmp_path / "gpu.tar.gz") as archive:
        assert sorted(archive.getnames()) == ["gpu/one.done", "gpu/one.log", "gpu/one/rows.csv"]


def test_names_are_unique_and_all_but_the_last_fit_into_forty_minutes():
    assert len({step.name for step in STEPS}) == len(STEPS)
    assert sum(step.minutes for step in STEPS[:-1]) <= 40


@pytest.mark.skipif(torch.cuda.is_available(), reason="every step would run")
@pytest.mark.parametrize("step", [step for step in STEPS if "nystrom" in step.words], ids=lambda step: step.name)
def test_every_command_is_one_that_only_wants_a_gpu(step, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [word.replace("{to}", str(tmp_path / "to")) for word in step.words[3:]]
    assert main(words) == 2
    assert "cuda" in capsys.readouterr().err


def test_errors_are_small_and_grow_with_coarser_dtypes():
    pytest.importorskip("triton")
    from tools.gpu_errors import error_rows

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"tokens": 48, "heads": 1, "width": 16, "landmarks": 8, "scales": (1.0,)}
    rows = list(error_rows(device=device, dtypes=("float32", "bfloat16"), **sizes))
    assert len(rows) == 2 * 2 * 4
    errors = {(row.dtype, row.method, row.quantity): row.value for row in rows}
    for method in ("nystrom-torch", "nystrom-triton"):
        # Rounding of float32 through an inverse of some hundred condition; bfloat16 has 2^-8.
        assert errors["float32", method, "relative error of output"] < 1e-4
        assert errors["bfloat16", method, "relative error of output"] < 3e-2
