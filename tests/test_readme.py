"""The code blocks of the pages run, those of a page in order and in one namespace, in their own folder."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The Makefile has installed it; the demo and full trainings take minutes to days; users have the published data.
NOT_RUN = (
    "git clone",
    "cd ",
    "make ",
    "pip install",
    "nystrom train",
    "torchrun",
    "nystrom bench efficiency  ",
    "nystrom bench model  ",
    "nystrom bench training  ",
)
NOT_RUN += ("nystrom lra run --preset ", "nystrom reproduce --all", "nystrom inspect")
NOT_RUN += ("nystrom reproduce nystromformer-figure-5 --data", "nystrom reproduce nystromformer-table-2 --data")
# What needs a GPU.
NOT_RUN += ("pytest -m gpu", "nystrom bench efficiency --device cuda", "python tools/tune_tiles.py")
NOT_RUN += tuple(f"nystrom data prepare {task} --from" for task in ("text", "retrieval", "image"))
NOT_RUN += (
    "nystrom data prepare mlm-sop --from wiki",
    "nystrom finetune",
    "nystrom predict",
    "nystrom convert my-model --to planned",
    "nystrom convert my-bert",
    "nystrom convert all-MiniLM-L6-v2",
    "nystrom convert runs/short/best",
    # Needs IMDB; test_examples.py has some made reviews.
    "python examples/join_reviews.py",
    "nystrom reproduce long-inputs",
    "nystrom report study results/",
)
NOT_RUN += (
    "nystrom pretrain --preset bert",
    "nystrom pretrain --preset longer",
    "nystrom pretrain listops",
    "nystrom pretrain pathfinder",
    "nystrom evaluate mlm-sop --model runs/base",
)


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.readme
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.readme
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run(page, tmp_path):
    """Short commands are run; those that take minutes or more must at least parse, as --help shows."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    commands = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    for line in commands:
        words = shlex.split(line, comments=True)
        if not words or line.startswith(NOT_RUN):
            if words[:1] == ["nystrom"]:
                assert_parses(words, path)
            continue
        # Kernels are interpreted in tests without a GPU; commands run as they do for a user.
        env = {**os.environ, "PATH": path, "TRITON_INTERPRET": "0"}
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stderr}"


def assert_parses(words, path):
    help_text = subprocess.run(
        [*words, "--help"], env={**os.environ, "PATH": path, "COLUMNS": "200"}, capture_output=True, text=True
    )
    assert help_text.returncode == 0, f"{shlex.join(words)}\n{help_text.stderr}"
    known = set(re.findall(r"--[\w.-]+", help_text.stdout))
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0]
            assert name in known, f"{shlex.join(words)} names an option that there is not: {name}"


def test_every_page_has_code():
    for page in PAGES:
        assert blocks(page, "python") or blocks(page, "bash"), page
