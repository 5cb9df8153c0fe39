import pytest
import torch

from nystrom_lab.training.presets import DataSizes
from nystrom_papers.studies.stability.arena import ArenaTask, find_sources, new_model, random_batches

TINY = DataSizes(folder="listops", train=12, val=3, test=2, min_length=5, max_length=40)


def test_all_methods_begin_with_the_same_weights(listops):
    methods = ("softmax", "nystrom", "kernelized", "skyformer")
    models = [new_model(listops, method, seed=3) for method in methods]
    first, *others = (dict(model.named_parameters()) for model in models)
    for other in others:
        assert list(other) == list(first)
        assert all(torch.equal(other[name], weight) for name, weight in first.items())
    other = new_model(listops, "softmax", seed=4)
    assert not torch.equal(other.classifier.dense.weight, models[0].classifier.dense.weight)


def test_batches_depend_on_the_seed_alone_and_use_each_sample_once_in_a_pass(listops, tmp_path):
    split = listops.open("train", tmp_path)

    def batches(seed, count=12):
        return list(random_batches(listops, split, batch=4, count=count, seed=seed))

    one, again, other = batches(0), batches(0), batches(1)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(one, again, strict=True))
    assert not all(torch.equal(a["labels"], b["labels"]) for a, b in zip(one, other, strict=True))
    pairs = (pair for batch in one for pair in zip(batch["input_ids"], batch["attention_mask"], strict=True))
    assert len({tuple(ids[keep].tolist()) for ids, keep in pairs}) == len(split) == 48
    assert len(batches(0, count=30)) == 30


def test_a_task_that_is_not_at_hand_is_drawn_once(tmp_path):
    source = ArenaTask("listops", None, TINY)
    split = source.open("train", tmp_path)
    assert len(split) == 12
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert len(source.open("val", tmp_path)) == 3
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def test_prepared_tasks_come_before_drawn_ones(data, pairs, tmp_path):
    assert [(s.task, s.folder) for s in find_sources(None, {"listops": TINY})] == [("listops", None)]
    folder = tmp_path / "data"
    folder.mkdir()
    with pytest.raises(ValueError, match="holds none of the folders listops, text"):
        find_sources(folder, {"listops": TINY})
    (folder / "retrieval").symlink_to(pairs)
    assert [(s.task, s.folder) for s in find_sources(folder, {"listops": TINY})] == [
        ("listops", None),
        ("retrieval", folder / "retrieval"),
    ]
    (folder / "listops").symlink_to(data)
    assert find_sources(folder, {"listops": TINY})[0].folder == folder / "listops"
