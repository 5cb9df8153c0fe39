"""The code blocks of the pages run, those of a page in order, in their own folder; trainings take fewer steps there."""

import csv
import importlib.util
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
_TESTS = ROOT / "packages" / "nystrom-lab" / "tests"
FAKE_SLURM = _TESTS / "training" / "grid" / "fake_slurm.py"
SPEC = importlib.util.spec_from_file_location("cifar_like", _TESTS / "data" / "cifar_like.py")
cifar_like = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(cifar_like)

# Commands that are not run here, and why; those of nystrom must at least be known, with their options.
NOT_RUN = {
    **dict.fromkeys(("git clone", "cd ", "make ", "pip install"), "the Makefile has done it"),
    **dict.fromkeys(
        (
            "pytest -m gpu",
            *(f"nystrom bench {kind} --device cuda" for kind in ("efficiency", "model")),
            "python tools/tune_tiles",
        ),
        "needs a GPU",
    ),
    **dict.fromkeys(
        ("nystrom heal my-bert", "nystrom heal near-minilm"),
        "minutes; a block of Python in docs/heal.md heals a small model",
    ),
    "nystrom bench engines": "minutes; it has a test of its own",
    "nystrom reproduce --all": "half an hour; each of its studies has tests of its own",
    **dict.fromkeys(
        [f"nystrom reproduce {name}" for name in ("nystromformer-figure-5", "nystromformer-table-2", "long-inputs")],
        "minutes at its small size; it has tests of its own",
    ),
}
# Options added to a command that would take minutes to days. A later option takes the place of an earlier one.
FEW_STEPS = "--steps 2 --evaluate-every 2 --log-every 1 --batch-size"
SHORTER = {
    "nystrom train": f"{FEW_STEPS} 2",
    "torchrun": f"{FEW_STEPS} 8",
    "nystrom pretrain --preset bert-base": f"{FEW_STEPS} 2 --num-hidden-layers 3 --hidden-size 32"
    " --num-attention-heads 4 --intermediate-size 48",
    "nystrom pretrain": f"{FEW_STEPS} 2",
    "nystrom finetune rte": "--steps 2 --max-length 64",
    "nystrom finetune --data single": "--epochs .1 --batch-size 2 --max-length 64",
    "nystrom finetune": "--steps 2 --warmup-steps 1 --batch-size 2 --accumulation 1 --max-length 64",
    "nystrom lra run --preset skyformer --to /shared": "--steps 2 --evaluate-every 2 --tasks listops --methods nystrom"
    " --seeds 0 --to runs/lra --data data --slurm.gpus 0",
    "nystrom lra run --preset": "--steps 2 --evaluate-every 2 --tasks listops --methods softmax nystrom --seeds 0",
    "nystrom inspect": "--length 512 --num-texts 1 --methods nystrom-4",
    "nystrom convert my-model --to calibrated": "--max-position-embeddings 1500",
    "nystrom convert all-MiniLM-L6-v2 --to near-minilm": "--max-position-embeddings 1500",
    "nystrom data prepare image": "--no-check-counts --val 30",
    **{f"nystrom data prepare {task} --from": "--no-check-counts" for task in ("text", "retrieval")},
    "nystrom bench efficiency  ": "--lengths 64 --repeats 1",
    "nystrom bench model  ": "--lengths 64 --repeats 1",
    "nystrom bench training  ": "--tasks image --methods softmax nystrom-64 --batch 1 --repeats 1",
    "python examples/join_reviews.py": "--reviews 3 --documents 6 1 4",
}


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def write_rows(file, *columns):
    """A table of some rows; the first value of a column is its name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as out:
        csv.writer(out, delimiter="\t" if file.suffix == ".tsv" else ",").writerows(zip(*columns, strict=True))


@pytest.fixture(scope="module")
def presupposed(tmp_path_factory, tiny_bert, prose):
    """A folder with what the commands of the pages take for granted: a user's models, texts and published data."""
    from transformers import BertConfig, BertModel

    from nystrom_lab.data.language.mlm_sop.task import prepare_mlm_sop
    from nystrom_lab.data.lra.listops.task import prepare_listops
    from nystrom_lab.data.lra.pathfinder.task import prepare_pathfinder
    from nystrom_lab.data.lra.texts.reviews import prepare_text

    at = tmp_path_factory.mktemp("presupposed")
    shutil.copytree(tiny_bert, at / "bert-base")
    BertModel(BertConfig.from_pretrained(tiny_bert, max_position_embeddings=512)).save_pretrained(at / "bert-base")
    for name in ("all-MiniLM-L6-v2", "bert-base-uncased", "bert-small", "BERT", "my-bert", "my-model"):
        (at / name).symlink_to("bert-base")
    for name in ("docs", "examples", "results"):
        (at / name).mkdir()
    for folder, pattern in (("examples", "*.py"), ("results", "*.csv")):
        for file in (ROOT / folder).rglob(pattern):
            target = at / folder / file.relative_to(ROOT / folder)
            target.parent.mkdir(exist_ok=True)
            target.symlink_to(file)

    (at / "bin").mkdir()
    for name in ("sbatch", "squeue", "srun"):
        (at / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE_SLURM}" {name} "$@"\n')
        (at / "bin" / name).chmod(0o755)

    lines = prose.read_text().splitlines()
    lines += [" ".join(reversed(line.split())) for line in lines]
    (at / "reviews.txt").write_text("\n".join(lines) + "\n")
    for name in ("documents.txt", "papers.txt"):
        (at / name).write_text("\n".join(" ".join(lines[i : i + 50]) for i in range(0, 400, 50)) + "\n")
    (at / "books").mkdir()
    (at / "books" / "one.txt").write_text("\n\n".join(lines))
    (at / "wiki.train.tokens.xz").write_bytes(lzma.compress("\n\n".join(lines).encode()))

    texts, again = lines[:60], lines[60:120]
    kinds = [i % 2 for i in range(60)]
    words = [("neg", "pos")[kind] for kind in kinds]
    for name in ("my.csv", "documents.csv"):
        write_rows(at / name, ["text", *texts], ["label", *words])
    write_rows(at / "new.csv", ["text", *texts[:4]])
    write_rows(at / "pairs.csv", ["question", *texts], ["answer", *again], ["good", *kinds])
    write_rows(at / "questions.csv", ["left", *texts], ["right", *again], ["same", *words])
    for split, texts in (("train", lines[:60]), ("dev", lines[60:120])):
        write_rows(at / "reviews" / f"{split}.csv", ["body", *texts], ["stars", *(kind + 0.5 for kind in kinds)])
        write_rows(at / "SST-2" / f"{split}.tsv", ["sentence", *texts], ["label", *kinds])
        entails = ["not_entailment" if kind else "entailment" for kind in kinds]
        pairs = ["sentence1", *texts], ["sentence2", *lines[120:180]], ["label", *entails]
        write_rows(at / "glue" / "RTE" / f"{split}.tsv", ["index", *range(60)], *pairs)
    (at / "glue" / "SST-2").symlink_to("../SST-2")
    for split in ("train", "test"):
        for kind in ("neg", "pos"):
            (at / "aclImdb" / split / kind).mkdir(parents=True)
            for i in range(20):
                text = " ".join([kind, split, *lines[10 * i : 10 * i + 10]])
                (at / "aclImdb" / split / kind / f"{i}_{i % 10}.txt").write_text(text)
    for i, name in enumerate(("train", "eval", "test")):
        columns = [kinds, range(60), range(100, 160), lines[60 * i : 60 * i + 60], again]
        write_rows(at / "lra_release" / "tsv_data" / f"new_aan_pairs.{name}.tsv", *columns)
    cifar_like.write_binary(at / "cifar-10-batches-bin", cifar_like.make_batches())

    data = at / "data"
    sizes = {"train": 48, "val": 16, "test": 16}
    prepare_listops(data / "listops", **sizes, min_length=5, max_length=40)
    prepare_text(at / "my.csv", data / "text")
    prepare_pathfinder(data / "pathfinder", **sizes, workers=1)
    for task, presets in (
        ("listops", ("demo", "small", "8000")),
        ("text", ("small", "16000")),
        ("pathfinder", ("small",)),
    ):
        for preset in presets:
            shutil.copytree(data / task, data / f"{task}-{preset}")
    prepare_mlm_sop([at / "books"], data / "mlm", tokenizer=tiny_bert, length=64, workers=1)
    return at


@pytest.mark.readme
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("page", "first"), [("README.md", "set -e"), ("docs/sentence-transformers.md", "set -e; source .venv/bin/activate")]
)
def test_a_page_runs_in_its_order_as_pasted(page, first, tmp_path):
    """In one shell, in a folder with the environment that `make demo` leaves, which README activates by itself."""
    there = tmp_path / ".venv" / "bin"
    there.mkdir(parents=True)
    for name in ("python", "nystrom"):
        (there / name).write_text(f'#!/bin/sh\nexec "{Path(sys.executable).with_name(name)}" "$@"\n')
        (there / name).chmod(0o755)
    (there / "activate").write_text(f'PATH="{there}:$PATH"\n')
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    script = [first]
    text = (ROOT / page).read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(bash|python)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        if language == "python":
            script += ["python - <<'END'", f"{block}END"]
        else:
            script += [line for line in block.splitlines() if not line.startswith(tuple(NOT_RUN))]
    assert "python - <<'END'" in script
    assert any(line.startswith("nystrom ") for line in script)
    env = {**os.environ, "PATH": os.defpath}
    done = subprocess.run(["bash", "-c", "\n".join(script)], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
def test_commands_run(page, presupposed, tmp_path):
    """All of a page in order, long ones shortened; what a test cannot run must at least parse, as --help shows."""
    work = tmp_path / "work"
    shutil.copytree(presupposed, work, symlinks=True)
    path = os.pathsep.join([str(work / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "FAKE_SLURM": str(tmp_path), "OMP_NUM_THREADS": "1"}
    # Kernels are interpreted in tests without a GPU; commands run as they do for a user.
    env["TRITON_INTERPRET"] = "0"
    # A free port for each torchrun: pages run side by side.
    env["PET_STANDALONE"] = "1"
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    for made in re.findall(r"--to (data/\S+)", "\n".join(lines)):
        shutil.rmtree(work / made, ignore_errors=True)
    for line in lines:
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if line.startswith(tuple(NOT_RUN)):
            if words[0] == "nystrom":
                assert_parses(words, env)
            continue
        done = subprocess.run(shortened(line, words), cwd=work, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{shlex.join(shortened(line, words))}\n{done.stderr}"


def shortened(line, words):
    """The words of a command, with those that make it take seconds."""
    for start, added in SHORTER.items():
        if line.startswith(start):
            words = [*words, *added.split()]
            break
    # A plan for the published error would keep so small a model exact.
    return [*words, "--budget", "9"] if "--budget" in words else words


def assert_parses(words, env):
    help_text = subprocess.run([*words, "--help"], env={**env, "COLUMNS": "200"}, capture_output=True, text=True)
    assert help_text.returncode == 0, f"{shlex.join(words)}\n{help_text.stderr}"
    known = set(re.findall(r"--[\w.-]+", help_text.stdout))
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0]
            assert name in known, f"{shlex.join(words)} names an option that there is not: {name}"


def test_every_page_has_code():
    for page in PAGES:
        assert blocks(page, "python") or blocks(page, "bash"), page
