"""No command writes over what it did not make, whichever of its options names the place."""

import importlib.util
import inspect
import os
from pathlib import Path

import pytest

from nystrom_lab.cli.main import COMMANDS, main
from nystrom_lab.data.lra.pathfinder.task import prepare_pathfinder

SPEC = importlib.util.spec_from_file_location("cifar_like", Path(__file__).parents[1] / "data" / "cifar_like.py")
cifar_like = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(cifar_like)

# Inputs of commands.
INPUTS = {
    *[
        "calibrate",
        "data",
        "file",
        "files",
        "folder",
        "model",
        "plan",
        "runs",
        "source",
        "sources",
        "texts",
        "tokenizer",
    ]
}
RUN, DATA = ("notes.txt", "run.json", "curves.png"), ("notes.txt", "dataset.json", "train_tokens.npy")
INSPECTED = ("rows.csv", "verdict.txt", "plan.json", "errors.png", "errors.svg", "attention.png", "sizes.svg")
STUDY = ("rows.csv", "setting.json", "summary.json", "seconds.json", "complexity.png", "maps-0.npz")
ON_TASK = "--data {data} --preset demo --device cpu"
ON_TEXTS = "--texts {text}"

# For each option that names a place to write to: the words of a command, and the files of others that are at the place,
# one at a time; "" is the place itself.
OUTPUTS = {
    ("train", "to"): [("listops --to {to} " + ON_TASK, RUN)],
    ("pretrain", "to"): [
        ("--to {to} --data {mlm} --length 32 --batch-size 8 --device cpu", RUN),
        ("listops --to {to} " + ON_TASK, RUN),
    ],
    ("finetune", "to"): [
        ("--to {to} --data {texts} --model {model}", RUN),
        ("--to {to} --data {texts} --model {model} --search.seed 0 1", ("notes.txt", "search.json", "trials.tsv")),
    ],
    ("predict", "to"): [("--data {texts} --model {model} --to {to}" + end, [""]) for end in (".tsv", ".jsonl")],
    ("data prepare listops", "to"): [("--to {to} --train 4 --val 2 --test 2", DATA)],
    ("data prepare text", "to"): [("--from {texts} --to {to}", DATA)],
    ("data prepare retrieval", "to"): [("--from {texts} --to {to}", DATA)],
    ("data prepare image", "to"): [("--from {cifar} --to {to} --no-check-counts", DATA)],
    ("data prepare pathfinder", "to"): [("--to {to} --train 4 --val 2 --test 2", DATA)],
    ("data prepare mlm-sop", "to"): [("--from {text} --tokenizer {model} --to {to}", DATA)],
    ("data show", "to"): [("pathfinder --data {pictures} --to {to}.png", [""])],
    ("tokenizer train", "to"): [("--from {text} --to {to}", ("notes.txt", "tokenizer.json"))],
    ("lra run", "to"): [("--tasks listops --data {above} --preset demo --to {to} --device cpu", ("lra.csv",))],
    ("lra curves", "figure"): [("{curves} --figure {to}" + end, [""]) for end in (".png", ".svg")],
    ("lra curves", "gather"): [("{curves} --figure {work}/new.png --gather {to}", [""])],
    ("inspect", "to"): [("{model} " + ON_TEXTS + " --to {to}", INSPECTED)],
    ("convert", "to"): [("{model} --to {to}", ("notes.txt", "config.json", "model.safetensors"))],
    ("heal", "to"): [("{model} " + ON_TEXTS + " --to {to}", ("notes.txt", "config.json", "model.safetensors"))],
    ("export", "to"): [("{model} --to {to}.onnx", ["", ".data"])],
    ("reproduce", "to"): [
        ("complexity --to {to}/..", STUDY),
        ("--all --to {to}", ("index.md",)),
    ],
    ("report study", "figure"): [("{curves} --study complexity --figure {to}" + end, [""]) for end in (".png", ".svg")],
    ("bench efficiency", "to"): [("--to {to}", ("efficiency.csv", "efficiency.png", "efficiency.svg"))],
    ("bench engines", "to"): [("{model} --to {to}.csv", [""])],
    ("bench model", "to"): [("--to {to}", ("model.csv", "model.png", "model.svg"))],
    ("bench training", "to"): [("--to {to}", ("training.csv", "training.png", "training.svg"))],
} | {
    (f"report {study}", "figure"): [("{curves} --figure {to}" + end, [""]) for end in (".png", ".svg")]
    for study in ("efficiency", "model", "training")
}
CASES = [(command, words, file) for (command, _), cases in OUTPUTS.items() for words, files in cases for file in files]


@pytest.fixture(scope="module")
def places(tmp_path_factory, data, tiny_bert, prose, mlm):
    """Inputs of commands, by their names in the words."""
    work = tmp_path_factory.mktemp("work")
    texts, curves = work / "texts.csv", work / "curves.csv"
    texts.write_text("text,label\n" + "".join(f"line {i} is here,{'ab'[i % 2]}\n" for i in range(50)))
    curves.write_text("run,step,quantity,value,seconds\n")
    pictures = prepare_pathfinder(work / "pictures", train=4, val=2, test=2, workers=1)
    found = {"data": data, "model": tiny_bert, "text": prose, "texts": texts, "curves": curves, "pictures": pictures}
    cifar = cifar_like.write_arrays(work / "cifar.npz", cifar_like.make_batches())
    return found | {"above": work, "work": work, "cifar": cifar, "mlm": mlm}


def content(path):
    """The content of a file, or of all files of a folder."""
    if path.is_dir():
        return {name: content(path / name) for name in os.listdir(path) if not name.startswith(".lock")}
    return path.read_bytes()


class Seen(BaseException):
    """The parameters of a command, before its words are parsed."""


def test_each_option_that_takes_a_path_is_known_to_read_or_to_write(monkeypatch):
    def cli(function, **named):
        raise Seen(inspect.signature(function).parameters)

    monkeypatch.setattr("tyro.cli", cli)
    found = set()
    for command in COMMANDS:
        for words in (["--x"], ["listops"]):
            with pytest.raises(Seen) as seen:
                main([*command.split(), *words])
            parameters = seen.value.args[0].items()
            found |= {(command, name) for name, value in parameters if "Path" in str(value.annotation)}
    assert {(command, name) for command, name in found if name not in INPUTS} == set(OUTPUTS)


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize(("command", "words", "file"), CASES)
def test_a_file_of_another_is_refused_by_name_and_stays(command, words, file, link, places, tmp_path, capsys):
    to = tmp_path / ("complexity-small" if "/.." in words else "place")
    if file and not file.startswith("."):
        to.mkdir()
        path = to / file
    else:
        path = tmp_path / f"{words.split()[-1].format(**{'to': to}).rpartition('/')[2]}{file}"
    mine = tmp_path / "mine"
    mine.write_text("mine\n")
    if link:
        path.symlink_to(mine)
    else:
        mine.replace(path)
    before = {name: content(tmp_path / name) for name in os.listdir(tmp_path)}
    code = main([*command.split(), *words.format(to=to, **places).split()])
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2, said
    assert said.startswith("nystrom: "), said
    assert str(path) in said or str(to) in said, said
    assert path.read_text() == "mine\n"
    assert path.is_symlink() == link
    assert {name: content(tmp_path / name) for name in before} == before
