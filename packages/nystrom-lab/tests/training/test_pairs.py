"""Pairs of documents are trained on like single ones, by one process or two."""

import pytest
import torch
from torch.testing import assert_close

from nystrom.models.heads.pairs import EncoderForPairClassification
from nystrom_lab.data.lra.texts.retrieval import Retrieval
from nystrom_lab.measure.rows import read_rows
from nystrom_lab.training.scoring import accuracy, load_model
from nystrom_lab.training.tasks import find_task


@pytest.fixture(scope="module")
def paired(tmp_path_factory, small_run, pairs):
    """An uninterrupted run on pairs, without dropout."""
    return small_run(tmp_path_factory.mktemp("paired") / "run", task="retrieval", data=pairs, dropout=0.0)


@pytest.mark.long
def test_pairs_are_trained_and_scored_each_counted_once(paired, pairs):
    task, split = find_task("retrieval"), Retrieval(pairs, "test")
    model = load_model(paired / "best", "retrieval", classes=["0", "1"])
    assert isinstance(model, EncoderForPairClassification)
    with torch.no_grad():
        right = 0
        for i in range(len(split)):
            batch = task.collate([split[i]])
            logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            right += int(logits.argmax()) == int(batch["labels"])
    rows = {row.quantity: row for row in read_rows(paired / "rows.csv")}
    assert rows["test accuracy"].value == right / 30
    assert accuracy(model, split, task, batch_size=7, device="cpu", precision="float32") == right / 30


@pytest.mark.long
def test_a_killed_run_on_pairs_resumes(paired, pairs, small_run, tmp_path, interrupted, weights, curves):
    interrupted(8, small_run, tmp_path / "run", task="retrieval", data=pairs, dropout=0.0)
    run = small_run(tmp_path / "run", task="retrieval", data=pairs, dropout=0.0, resume=True)
    assert_close(weights(run), weights(paired), rtol=0, atol=0)
    assert curves(run) == curves(paired)


@pytest.mark.slow
def test_two_processes_give_the_run_of_one_on_pairs(paired, pairs, torchrun, demo_words, tmp_path, same_run):
    done = torchrun(2, "train", "retrieval", *demo_words, "--data", pairs, "--to", tmp_path / "two")
    assert done.returncode == 0, done.stderr[-3000:]
    same_run(tmp_path / "two", paired)
