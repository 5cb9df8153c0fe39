import sys
import tarfile

import pytest
import torch

from nystrom.cli.main import main
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
    assert measure(steps, tmp_path, minutes=10) == ([], [])
    assert (tmp_path / "bad" / "rows.csv").read_text() == "['--resume']"


def test_no_step_begins_that_would_not_end_in_time_but_a_shorter_one_does(tmp_path):
    steps = [python("long", 5, WRITE), python("short", 1, WRITE)]
    assert measure(steps, tmp_path, minutes=2) == ([], ["long"])
    assert (tmp_path / "short.done").exists()


def test_a_step_that_hangs_is_ended(tmp_path):
    hangs = python("hangs", 0.01, "import time; time.sleep(60)")
    assert measure([hangs], tmp_path, minutes=1) == (["hangs"], [])


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
