"""Facts of the splits of all tasks, and of the folders that they are in."""

import importlib.util
import pickle
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

from nystrom_lab.data.lra.image import Image, prepare_image
from nystrom_lab.data.lra.listops.task import ListOps, prepare_listops
from nystrom_lab.data.lra.pathfinder import task as lra_pathfinder
from nystrom_lab.data.lra.texts.retrieval import Retrieval, prepare_retrieval
from nystrom_lab.data.lra.texts.reviews import Text, prepare_text
from nystrom_lab.data.store.token_files import SPLITS

SPEC = importlib.util.spec_from_file_location("cifar_like", Path(__file__).parent / "cifar_like.py")
cifar_like = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(cifar_like)


def listops(source, to, seed=0):
    sizes = {"train": 30, "val": 12, "test": 10, "min_length": 5, "max_length": 40}
    return prepare_listops(to, seed=seed, workers=1, **sizes)


def pathfinder(source, to, seed=0):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lra_pathfinder, "chunk_size", lambda geometry: 16)
        sizes = {"train": 30, "val": 12, "test": 10}
        return lra_pathfinder.prepare_pathfinder(to, seed=seed, workers=1, **sizes)


def text(source, to, seed=0):
    rows = "".join(f"{label} text {i},{label}\n" for i in range(40) for label in ("no", "yes"))
    (source / "a.csv").write_text("text,label\n" + rows)
    return prepare_text(source / "a.csv", to, seed=seed)


def retrieval(source, to, seed=0):
    rows = "".join(f"one {i}\t{label} two {i % 7}\t{label}\n" for i in range(40) for label in ("no", "yes"))
    (source / "a.tsv").write_text("text1\ttext2\tlabel\n" + rows)
    return prepare_retrieval(source / "a.tsv", to, seed=seed)


def image(source, to, seed=0):
    if not (source / "cifar-10-batches-bin").exists():
        cifar_like.write_binary(source / "cifar-10-batches-bin", cifar_like.make_batches())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return prepare_image(source, to, val=20, seed=seed, check_counts=False)


TASKS = {ListOps: listops, lra_pathfinder.Pathfinder: pathfinder, Text: text, Retrieval: retrieval, Image: image}


@pytest.fixture(scope="module", params=TASKS, ids=lambda task: task.task)
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    return request.param, TASKS[request.param](folder, folder / "data")


def arrays(item):
    return item["input_ids"] if isinstance(item["input_ids"], tuple) else (item["input_ids"],)


def same(one, other):
    return one["labels"] == other["labels"] and all(map(np.array_equal, arrays(one), arrays(other)))


def test_a_split_is_what_a_loader_and_a_model_ask_for(made):
    task, folder = made
    for split in SPLITS:
        data = task(folder, split)
        items = list(data)
        assert [item["labels"] for item in items] == data.labels.tolist()
        assert [max(map(len, arrays(item))) for item in items] == data.lengths.tolist()
        assert all(each.min() >= 0 and each.max() < data.vocab_size for item in items for each in arrays(item))
        assert len(data.classes) == data.num_labels
        assert data.majority_share == max(data.labels.tolist().count(label) for label in data.labels) / len(data)
        assert same(data[-1], items[-1])
        assert all(map(same, data.__getitems__([5, 0, 5]), (items[i] for i in (5, 0, 5))))
        for index in (len(data), -len(data) - 1):
            with pytest.raises(IndexError, match=f"index {index} is out of range for the {len(data)} samples of"):
                data[index]
        # The returned arrays belong to the caller.
        arrays(data[0])[0][:] = 3
        assert same(data[0], items[0])
        # A copy for another process carries no data.
        assert len(copy := pickle.dumps(data)) < 500
        assert same(pickle.loads(copy)[7], data[7])
        data.verify()


def test_a_folder_is_used_again_and_other_settings_are_named(made, capsys):
    task, folder = made
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert TASKS[task](folder.parent, folder) == folder
    assert f"{folder} already holds this data set; it is reused." in capsys.readouterr().err
    with pytest.raises(ValueError, match="seed=0 there and 2 asked for"):
        TASKS[task](folder.parent, folder, seed=2)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_damaged_folder_is_not_used_and_a_missing_one_is_named(made, tmp_path):
    task, folder = made
    shutil.copytree(folder, tmp_path / "data")
    with (tmp_path / "data" / "test_tokens.npy").open("ab") as file:
        file.write(b"x")
    for use in (
        lambda: TASKS[task](folder.parent, tmp_path / "data"),
        lambda: task(tmp_path / "data", "test"),
        lambda: task(tmp_path / "data", "val").verify(),
    ):
        with pytest.raises(ValueError, match=r"test_tokens.npy has \d+ bytes instead of \d+: .* are damaged"):
            use()
    with pytest.raises(ValueError, match=rf"none is not a folder: .*`nystrom data prepare {task.task} .*--to .*/none`"):
        task(tmp_path / "none", "train")
