"""No command loses what was there: each with each state of what it makes, replaces or goes on with."""

import os
import shutil
from pathlib import Path

import pytest

from nystrom.sums import find_fault
from nystrom_lab.cli.main import main

pytestmark = pytest.mark.long

WORDS = ["a", "the", "of", "and", "in", "one", "two", "three", "river", "stone", "map", "road", "hill", "church"]
SMALL = ["--steps", "4", "--batch-size", "8", "--evaluate-every", "2", "--device", "cpu"]


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, kept in (("train", WORDS[8:11]), ("val", WORDS[11:])):
        lines = [f"{other} {word}" for other in WORDS[:8] for word in kept]
        rows = "".join(f"{line},{line > 'one'}\n" for line in lines)
        (folder / f"{name}.csv").write_text(f"text,label\n{rows}")
    return folder


@pytest.fixture(scope="session")
def commands(data, texts, tiny_bert, prose):
    """The words of each command, except --to."""
    listops = ["listops", "--data", str(data), "--preset", "demo", *SMALL]
    tuned = ["finetune", "--model", str(tiny_bert), "--data", str(texts), *SMALL]
    sizes = ["--train", "20", "--val", "10", "--test", "10", "--max-length", "41", "--min-length", "5"]
    return {
        "train": ["train", *listops],
        "pretrain": ["pretrain", *listops],
        "finetune": tuned,
        "search": [*tuned, "--search.learning-rate", "1e-3", "1e-2"],
        "convert": ["convert", str(tiny_bert)],
        "prepare": ["data", "prepare", "listops", *sizes],
        "tokenizer": ["tokenizer", "train", "--from", str(prose), "--size", "100"],
    }


@pytest.fixture(scope="session")
def made(tmp_path_factory, commands):
    """The output of each command, made once."""

    def make(name):
        if name not in done:
            done[name] = tmp_path_factory.mktemp(name) / "to"
            assert main([*commands[name], "--to", str(done[name])]) == 0
        return done[name]

    done = {}
    return make


def finished(to):
    return to / "best"


def unfinished(to):
    (to / "rows.csv").unlink()
    return to / "best"


def searched(to):
    """The results of a search were not written."""
    (to / "trials.tsv").unlink()
    return to / "best"


def a_checkpoint_again(to):
    (to / "rows.csv").unlink()
    return to / "checkpoint-4"


def without_checkpoints(to):
    for checkpoint in to.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    return to / "best"


def of_a_trial(to):
    """A trial whose checkpoints are not kept."""
    return next(trial for trial in (to / "trials").iterdir() if not list(trial.glob("checkpoint-*"))) / "checkpoint-7"


RESUMED = [
    *(("train", place) for place in (finished, unfinished, a_checkpoint_again, without_checkpoints)),
    ("pretrain", unfinished),
    *(("finetune", place) for place in (finished, unfinished)),
    *(("search", place) for place in (finished, searched, of_a_trial)),
]


def foreign_folder(place):
    place.mkdir()
    (place / "thesis.tex").write_text("mine")


def foreign_file(place):
    place.write_text("mine")


def link(place):
    (place.parents[1] / "elsewhere").mkdir()
    foreign_file(place.parents[1] / "elsewhere" / "thesis.tex")
    place.symlink_to(place.parents[1] / "elsewhere")


def link_to_an_empty_folder(place):
    (place.parents[1] / "elsewhere").mkdir()
    place.symlink_to(place.parents[1] / "elsewhere")


def broken_link(place):
    place.symlink_to(place.parent / "nowhere")


def leftover(place):
    """Leave what a process leaves that was killed before or between the two renames."""
    partial = place.parent / f".{place.name}.01234567.partial"
    partial.mkdir()
    Path(f"{partial}.lock").touch()


def file_added(place):
    if place.is_dir():
        (place / "README.md").write_text("mine")


def damaged(place):
    for file in place.glob("*.safetensors"):
        file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])


NEW = [foreign_folder, foreign_file, link, link_to_an_empty_folder, broken_link, leftover]


def belongings(folder):
    """How often there is each content of a user's files, and each link; where they are does not matter."""
    found = []
    for path in folder.rglob("*"):
        if path.is_symlink():
            found.append(os.readlink(path))
        elif path.is_file() and path.read_bytes() == b"mine":
            found.append("mine")
    return sorted(found)


@pytest.mark.parametrize("state", [*NEW, file_added, damaged])
@pytest.mark.parametrize(("name", "where"), RESUMED)
def test_a_run_that_goes_on_loses_nothing(made, commands, tmp_path, capsys, name, where, state):
    to = shutil.copytree(made(name), tmp_path / "to")
    place = where(to)
    if state in NEW and place.exists():
        place.rename(tmp_path / "ours")
    state(place)
    rows, mine = to / "rows.csv", belongings(tmp_path)
    before = rows.read_bytes() if rows.is_file() else None
    capsys.readouterr()
    code = main([*commands[name], "--to", str(to), "--resume"])
    printed = capsys.readouterr()
    assert belongings(tmp_path) == mine
    assert code in (0, 2), printed.err
    if code:
        # The model of a trial is damaged, or there is no checkpoint: one line, that names it.
        assert printed.err.startswith("nystrom: ")
        assert str(to) in printed.err
    elif where is not finished and where is not without_checkpoints and where is not of_a_trial:
        assert find_fault(place) == "" or place.is_symlink()
    if before is not None and name != "search":
        # A model that is not whole is refused.
        assert "is finished: nothing is left to train" in printed.out or (
            "is finished, but model" in printed.err and code
        )
        assert rows.read_bytes() == before
        assert "step 1 of" not in printed.out


@pytest.mark.parametrize("state", NEW)
@pytest.mark.parametrize("name", ["train", "finetune", "search", "convert", "prepare", "tokenizer"])
def test_a_new_folder_takes_the_place_of_nothing(commands, tmp_path, capsys, name, state):
    (tmp_path / "inside").mkdir()
    to = tmp_path / "inside" / "to"
    state(to)
    mine = belongings(tmp_path)
    code = main([*commands[name], "--to", str(to)])
    printed = capsys.readouterr()
    assert belongings(tmp_path) == mine
    assert code in (0, 2), printed.err
    if code:
        [line] = printed.err.splitlines()[-1:]
        assert line.startswith("nystrom: ")
        assert str(tmp_path) in line
        # Refused before the work, of which there is nothing.
        assert "step 1 of" not in printed.out
    else:
        assert state in (leftover, link_to_an_empty_folder, broken_link)


def test_a_damaged_trial_is_not_copied_over_the_model_of_its_search(made, commands, tmp_path, capsys):
    to = shutil.copytree(made("search"), tmp_path / "to")
    [best] = [trial / "best" for trial in (to / "trials").iterdir() if (trial / "best").is_dir()]
    damaged(best)
    assert main([*commands["search"], "--to", str(to), "--resume"]) == 0
    assert find_fault(to / "best") == ""
    shutil.rmtree(to / "best")
    assert main([*commands["search"], "--to", str(to), "--resume"]) == 2
    assert f"model {best}: model.safetensors is damaged" in capsys.readouterr().err
    (best / "complete.json").unlink()
    assert main([*commands["search"], "--to", str(to), "--resume"]) == 2
    assert f"model {best}: complete.json is missing" in capsys.readouterr().err


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_again(made, commands, tmp_path, capsys):
    to = shutil.copytree(made("train"), tmp_path / "to")
    unfinished(to)
    for checkpoint in to.glob("checkpoint-*"):
        damaged(checkpoint)
    before = {path: path.read_bytes() for path in to.glob("checkpoint-*/*")}
    assert main([*commands["train"], "--to", str(to), "--resume"]) == 2
    assert "has no checkpoint to continue from (checkpoint-2: model.safetensors is damaged" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in to.glob("checkpoint-*/*")} == before


def test_a_log_is_not_written_through_a_link(data, tmp_path, capsys):
    (tmp_path / "to").mkdir()
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "to" / "listops-nystrom-demo-seed0.log").symlink_to(tmp_path / "victim")
    words = ["lra", "run", "--tasks", "listops", "--methods", "nystrom", "--seeds", "0", "--preset", "demo"]
    assert main([*words, "--data", str(data.parent), "--to", str(tmp_path / "to"), "--device", "cpu"]) == 2
    assert "seed0.log is a symbolic link, which is not written through" in capsys.readouterr().err
    assert (tmp_path / "victim").read_text() == "mine"
