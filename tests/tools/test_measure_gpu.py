import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from tools.measure_gpu import FIRST, STEPS, Step, main, measure, pack

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*map(str, ROOT.glob("packages/*/src")), str(ROOT)]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES), "OMP_NUM_THREADS": "1"}


def python(name, minutes, code):
    return Step(name, minutes, (sys.executable, "-c", code, "{to}"))


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
    steps[0] = python("bad", 1, WRITE)
    assert measure(steps, tmp_path, minutes=10) == ([], [])
    assert (tmp_path / "bad" / "rows.csv").exists()


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


def test_names_are_unique_and_the_first_steps_fit_into_13_minutes():
    assert len({step.name for step in STEPS}) == len(STEPS)
    assert sum(step.minutes for step in STEPS[:FIRST]) <= 13
    # Each ends, with half as long again, in a call of nine minutes.
    assert max(step.minutes for step in STEPS) <= 6


def test_exact_heads_and_selected_keys_are_among_the_first_steps():
    measured = {name for step in STEPS[:FIRST] for name in step.given.get("methods", ())}
    assert {"near_far-selected", "near_far-heads-triton"} <= measured


CALLED = [step for step in STEPS if step.calls]


@pytest.mark.skipif(torch.cuda.is_available(), reason="every step would run")
@pytest.mark.parametrize("step", CALLED, ids=lambda step: step.name)
def test_every_call_is_one_that_only_wants_a_gpu(step, tmp_path, capsys, monkeypatch):
    if step.calls.startswith("tools.tune_tiles"):
        pytest.importorskip("triton")
    monkeypatch.chdir(tmp_path)
    words = [word.replace("{to}", str(tmp_path / "to")) for word in step.words[2:]]
    monkeypatch.setattr(sys, "argv", ["measure_gpu.py", *words])
    assert main() == 2
    assert "cuda" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="every step would run")
@pytest.mark.parametrize("step", [step for step in STEPS if not step.calls], ids=lambda step: step.name)
def test_every_program_is_one_that_only_wants_a_gpu(step, tmp_path):
    pytest.importorskip("triton")
    words = [word.replace("{to}", str(tmp_path / "to")) for word in step.words]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=ENV)
    assert done.returncode != 0
    assert re.search("cuda device|device is cuda", done.stdout + done.stderr, re.IGNORECASE)


def test_rows_of_a_step_are_printed(tmp_path, capsys, monkeypatch):
    (step,) = (step for step in STEPS if step.name == "wider-128")
    small = {"device": "cpu", "lengths": (16,), "methods": ("softmax",), "heads": 1, "batch": 1, "width": 4}
    monkeypatch.setattr("tools.measure_gpu.STEPS", (step._replace(given={**step.given, **small}),))
    monkeypatch.setattr(sys, "argv", ["measure_gpu.py", "--step", step.name, "--to", str(tmp_path)])
    assert main() == 0
    assert len(re.findall("n=16 softmax .* forward", capsys.readouterr().out)) == 4
    assert (tmp_path / "efficiency.csv").exists()


def test_no_step_installs_or_downloads():
    for step in STEPS:
        assert not re.search(r"\bpip\b|://", " ".join(map(str, [*step.words, *step.given.values()])))


# Packages that a machine with a GPU has at least, beside what they need; and none of the second line.
PACKAGES = """
torch triton numpy psutil tqdm safetensors sentencepiece tokenizers transformers accelerate scikit-learn scipy
matplotlib pillow filelock jaxtyping pytest pytest-xdist pytest-timeout hypothesis einops pandas peft timm setuptools
"""
ABSENT = {"tyro", "rich", "beartype", "submitit", "nystrom_attention", "performer_pytorch"}


def modules_of(packages):
    """The modules of these packages and of those that they need."""
    needed, left = set(), [*packages]
    while left:
        name = re.sub("[-_.]+", "-", left.pop()).lower()
        if name in needed:
            continue
        needed.add(name)
        try:
            asked = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        left += [re.match("[A-Za-z0-9._-]+", each)[0] for each in asked if "extra ==" not in each]
    held = importlib.metadata.packages_distributions()
    return {
        module for module, names in held.items() if {re.sub("[-_.]+", "-", name).lower() for name in names} & needed
    }


# Runs every step as far as a CPU can: with few tokens, or until all that it imports is there.
CODE = """
import importlib, importlib.util, inspect, pathlib, re, sys, tempfile

packages = {*sys.argv[1].split(), *sys.stdlib_module_names}


class Only:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        return self.finder.find_spec(name, path, target) if top in packages or top.startswith("_") else None


sys.meta_path[:] = [Only(finder) for finder in sys.meta_path]
for absent in ("tyro", "rich", "beartype"):
    assert importlib.util.find_spec(absent) is None
from tools.measure_gpu import STEPS

from nystrom_papers.bench.model import EncoderSizes

# Compilers take minutes, and graphs need a device: packages/nystrom-papers/tests/bench has tests of both.
EAGER = {"launches": ("eager",), "repeats": 1, "batch": 1, "lengths": (32,)}
ENCODER = {"layers": 1, "heads": 2, "width": 32, "intermediate": 16}
SMALL = {
    "run_efficiency": {**EAGER, "heads": 2, "width": 16, "passes": ("forward",)},
    "run_model": {**EAGER, **ENCODER},
    "run_training": {"tasks": ("image",), "batch": 1, "methods": ("softmax", "near_far"), "repeats": 1},
    "write_model_errors": {"lengths": (32,), "sizes": EncoderSizes(**ENCODER, vocabulary=50)},
}
for step in STEPS:
    module, name = [*step.calls.split(":"), ""][:2]
    if name in SMALL:
        # Few landmarks, since the interpreter takes minutes for many.
        methods = tuple(re.sub("-[0-9]+$", "-8", each) for each in step.given.get("methods", ()))
        small = {**step.given, "methods": methods, **SMALL[name], "device": "cpu"}
        rows = step._replace(given=small).call(pathlib.Path(tempfile.mkdtemp()))
        missing = {row.method: row.note for row in rows if row.note}
        assert not missing, missing
    elif step.calls:
        found = getattr(importlib.import_module(module), name)
        inspect.signature(found).bind(**step.given, to=pathlib.Path())
    elif step.words[1].startswith("tools/"):
        importlib.import_module(step.words[1].removesuffix(".py").replace("/", "."))
importlib.import_module("nystrom_lab.training.arena")
import pytest

tests = [word for step in STEPS for word in step.words if word.startswith("packages/")]
plugins = ["-p", "xdist.plugin", "-p", "pytest_timeout"]
sys.exit(pytest.main(["--collect-only", "-q", "-m", "gpu or not gpu", "-W", "default", *plugins, *tests]))
"""


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="every step would run")
def test_no_step_needs_a_package_that_a_machine_with_a_gpu_may_lack():
    pytest.importorskip("triton")
    packages = (modules_of(PACKAGES.split()) | {"nystrom", "nystrom_lab", "nystrom_papers", "tests", "tools"}) - ABSENT
    more = {"TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, " ".join(packages)], capture_output=True, text=True, cwd=ROOT, env=ENV | more
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_errors_are_small_and_grow_with_coarser_dtypes():
    pytest.importorskip("triton")
    from tools.gpu_errors import METHODS, error_rows

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"tokens": 48, "heads": 1, "width": 16, "methods": dict.fromkeys(METHODS, 8), "scales": (1.0,)}
    rows = list(error_rows(device=device, dtypes=("float32", "bfloat16"), **sizes))
    assert len(rows) == 3 * 2 * 2 * 4
    errors = {(row.dtype, row.method, row.quantity): row.value for row in rows}
    for method in (f"{name}-{backend}" for name in METHODS for backend in ("torch", "triton")):
        # Rounding of float32 through an inverse of some hundred condition; bfloat16 has 2^-8.
        assert errors["float32", method, "relative error of output"] < 1e-4
        assert errors["bfloat16", method, "relative error of output"] < 3e-2


def test_hidden_states_are_compared_with_those_of_exact_attention(tmp_path):
    from nystrom_papers.bench.model import EncoderSizes
    from tools.gpu_errors import write_model_errors

    sizes = EncoderSizes(layers=1, width=8, heads=2, intermediate=12, vocabulary=20)
    asked = {"to": tmp_path, "device": "cpu", "dtype": "float32", "lengths": (96,), "sizes": sizes}
    rows = write_model_errors(methods=("softmax", "near_far-4"), **asked)
    exact, near_far = (row.value for row in rows)
    assert exact == 0 < near_far < 0.1
    assert write_model_errors(methods=("softmax", "near_far-4"), **asked) == rows
    with pytest.raises(ValueError, match="'linformer-4' has weights of its own"):
        write_model_errors(methods=("softmax", "linformer-4"), **asked | {"to": tmp_path / "other"})
