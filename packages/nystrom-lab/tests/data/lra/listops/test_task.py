import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nystrom_lab.data.lra.listops import task as lra_listops
from nystrom_lab.data.lra.listops.expressions import VOCABULARY
from nystrom_lab.data.lra.listops.task import ListOps, first_operator_share, prepare_listops
from nystrom_lab.data.store.token_files import SPLITS

SMALL = {"train": 300, "val": 40, "test": 50, "min_length": 10, "max_length": 60, "max_depth": 5, "max_args": 6}
PYTHON = {"[MIN": "min((", "[MAX": "max((", "[MED": "median((", "[SM": "total((", "X": ")),"} | {
    str(digit): f"{digit}," for digit in range(10)
}


def prepare(to, **settings):
    return prepare_listops(to, **(SMALL | settings))


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("listops") / "data")


def test_samples_are_labelled_with_their_value(made):
    names = {"median": lambda values: int(statistics.median(values)), "total": lambda values: sum(values) % 10}
    for split in SPLITS:
        data = ListOps(made, split)
        assert len(data) == SMALL[split]
        for i, item in enumerate(data):
            expression = "".join(PYTHON[VOCABULARY[token]] for token in item["input_ids"])
            # Python itself is the oracle; a trailing comma makes a tuple of one.
            assert eval(expression, names) == (item["labels"],) == (data.labels[i],)
            assert len(item["input_ids"]) == data.lengths[i]


def test_no_sample_occurs_twice_in_all_splits(tmp_path):
    # Expressions this short often repeat.
    to = prepare(tmp_path / "data", min_length=3, max_length=6)
    samples = [item["input_ids"].tobytes() for split in SPLITS for item in ListOps(to, split)]
    assert len(samples) == len(set(samples)) == 390


def test_only_the_seed_determines_the_data(made, tmp_path):
    # Several chunks: otherwise their order of arrival could not matter.
    settings = {"train": 4000, "min_length": 40}
    one = prepare(tmp_path / "one", workers=1, **settings)
    assert files(one) == files(prepare(tmp_path / "two", workers=2, **settings))
    assert files(one) == files(prepare(tmp_path / "five", workers=5, **settings))
    other = files(prepare(tmp_path / "other", seed=1))
    assert all(other[name] != content for name, content in files(made).items() if "val" not in name or "tokens" in name)


def test_all_cores_draw_by_default(tmp_path, monkeypatch):
    pools = []

    def pool(workers):
        pools.append(workers)
        return ThreadPoolExecutor(workers)

    monkeypatch.setattr(lra_listops, "ThreadPoolExecutor", pool)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5}, raising=False)
    prepare(tmp_path / "all")
    prepare(tmp_path / "two", workers=2)
    assert pools == [3, 2]


def test_more_training_data_leave_test_and_validation_as_they_were(made, tmp_path):
    more = prepare(tmp_path / "more", train=600)
    for split in ("val", "test"):
        for part in ("tokens", "offsets", "labels"):
            assert (more / f"{split}_{part}.npy").read_bytes() == (made / f"{split}_{part}.npy").read_bytes()
    assert ListOps(more, "train").lengths[:300].tolist() == ListOps(made, "train").lengths.tolist()


def test_the_first_operator_alone_tells_more_than_the_largest_class(made):
    train, test = ListOps(made, "train"), ListOps(made, "test")
    seen = {}
    for sample in train:
        seen.setdefault(sample["input_ids"][0], []).append(sample["labels"])
    right = [statistics.mode(sorted(seen[sample["input_ids"][0]])) == sample["labels"] for sample in test]
    told = first_operator_share(train, test)
    assert told == statistics.fmean(right)
    assert told > test.majority_share


def test_a_split_may_be_empty(tmp_path):
    to = prepare(tmp_path / "data", val=0, train=0)
    assert [len(ListOps(to, split)) for split in SPLITS] == [0, 0, 50]
    empty, test = ListOps(to, "val"), ListOps(to, "test")
    assert empty.majority_share == 0
    assert first_operator_share(test, empty) == 0


def test_the_official_files_can_be_added_later(tmp_path):
    at_once = prepare(tmp_path / "at_once", tsv=True)
    later = prepare(tmp_path / "later")
    assert files(at_once).keys() - files(later).keys() == {"basic_train.tsv", "basic_val.tsv", "basic_test.tsv"}
    prepare(later, tsv=True)
    assert files(at_once) == files(later)
    assert (later / "basic_train.tsv").read_text().count("\n") == 301


def test_a_link_and_a_relative_name_lead_to_the_folder(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    monkeypatch.chdir(tmp_path)
    assert prepare(Path("link")) == tmp_path / "disk"
    assert len(ListOps(Path("link"), "val")) == 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": -1}, "--train is -1; expected a whole number of at least 0"),
        ({"val": -5}, "--val is -5; expected"),
        ({"train": 0, "val": 0, "test": 0}, "all 0: ask for at least one"),
        ({"seed": -1}, "--seed is -1; expected"),
        ({"workers": 0}, "--workers is 0; expected a whole number of at least 1"),
        ({"min_length": 60}, "--min-length 60 and --max-length 60 leave no room"),
    ],
)
def test_impossible_settings_raise_before_the_work(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        # A billion expressions, which would take days.
        prepare(tmp_path / "data", **{"train": 10**9} | change)
    assert not list(tmp_path.iterdir())


def test_places_that_cannot_be_used_raise_before_the_work(made, tmp_path):
    (tmp_path / "letter.txt").touch()
    for to, says in ((tmp_path, "is not empty"), (made, "train=300 there"), (Path("/proc/data"), "cannot be made")):
        with pytest.raises(ValueError, match=says):
            prepare(to, train=10**9)
    assert os.listdir(tmp_path) == ["letter.txt"]


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    draw, calls = lra_listops.draw_expressions, []

    def draw_once(*arguments):
        calls.append(arguments)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return draw(*arguments)

    monkeypatch.setattr(lra_listops, "draw_expressions", draw_once)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "data", train=5000, workers=1)
    assert not list(tmp_path.iterdir())


def test_more_samples_than_there_are_expressions_end_in_an_error(tmp_path):
    # Exactly four tokens: an operator and two digits, 400 in all.
    four = {"min_length": 3, "max_length": 5, "val": 0, "test": 0}
    assert len(ListOps(prepare(tmp_path / "all", train=400, **four), "train")) == 400
    message = (
        r"ask for 401 different samples, but \d+ expressions between --min-length 3 and --max-length 5 held only 400:"
    )
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path / "more", train=401, **four)
    assert os.listdir(tmp_path) == ["all"]


def test_progress_counts_the_samples_only_on_a_terminal(tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys.stderr, "isatty", lambda: True)
        patch.setattr("nystrom.progress._BAR", 0)
        prepare_listops(tmp_path / "data", **SMALL)
    assert "/390" in capsys.readouterr().err
    prepare_listops(tmp_path / "piped", **SMALL)
    assert not capsys.readouterr().err
    prepare(tmp_path / "quiet")
    assert not capsys.readouterr().err
