import dataclasses
import math

import pytest
import torch

from nystrom.models.heads.pairs import EncoderForPairClassification
from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.measure.memory import free_bytes
from nystrom_lab.measure.rows import read_rows
from nystrom_papers.bench import lra_steps
from nystrom_papers.bench.lra_steps import build_model, random_batch
from nystrom_papers.bench.options import TABLE_2_METHODS, TrainingOptions
from nystrom_papers.bench.training import run_training

CPU = torch.device("cpu")
SMALL = {"tasks": ("text", "retrieval"), "methods": ("softmax", "nystrom-8"), "batch": 2, "repeats": 3}


# The tasks with fewer tokens.
SHORT = {name: dataclasses.replace(task, max_length=24) for name, task in LRA.items()}


def setup(*, shapes=SHORT, command="nystrom bench training --tasks text", free_bytes=free_bytes, **changes):
    """The setup of `run_training` with short samples."""
    options = TrainingOptions(**{"methods": SMALL["methods"], "batch": 2, "repeats": 3, "threads": 1, **changes})
    return dataclasses.replace(lra_steps.step_setup(options, command, CPU), shapes=shapes, free_bytes=free_bytes)


def test_the_shapes_are_those_of_the_papers():
    shapes = {
        name: (task.max_length, task.vocab_size, task.num_labels, lra_steps.paper_batch(name))
        for name, task in LRA.items()
    }
    assert shapes == {
        "listops": (2000, 17, 10, 32),
        "text": (4000, 257, 2, 16),
        "retrieval": (4000, 257, 2, 16),
        "image": (1024, 256, 10, 256),
        "pathfinder": (1024, 256, 2, 128),
    }


def test_the_command_measures_at_the_shapes_of_the_papers(tmp_path):
    asked = {"tasks": ("image",), "methods": ("nystrom-8",), "batch": 1, "repeats": 1, "threads": 1}
    rows = run_training(TrainingOptions(**asked, to=tmp_path))
    assert read_rows(tmp_path / "training.csv") == rows
    assert [(row.quantity, row.n, row.note) for row in rows] == [
        (f"image step {what}", 1024, "") for what in ("time", "memory")
    ]
    words = "--repeats 1 --methods nystrom-8 --batch 1 --threads 1 --tasks image"
    assert {row.command for row in rows} == {f"nystrom bench training {words}"}


@pytest.mark.long
def test_rows_hold_each_task_method_and_quantity(tmp_path):
    rows = lra_steps.measure_tasks(SMALL["tasks"], setup(seed=3), tmp_path / "training.csv")
    assert [(row.quantity, row.method) for row in rows] == [
        (f"{task} step {what}", method)
        for task in ("text", "retrieval")
        for method in ("softmax", "nystrom-8")
        for what in ("time", "memory")
    ]
    assert read_rows(tmp_path / "training.csv") == rows
    for row in rows:
        timed = row.quantity.endswith("time")
        assert (row.study, row.unit, row.repeats) == ("training", "ms" if timed else "MB", 3 if timed else 1)
        assert (row.n, row.m, row.seed, row.note) == (24, None if row.method == "softmax" else 8, 3, "")
        assert row.value > 0
        assert row.low <= row.value <= row.high if timed else row.low is row.high is None
    assert rows[0].words.startswith("b=2 documents=1 layers=2 width=64 heads=2 hidden=128 threads=")
    assert "documents=2" in rows[-1].words


@pytest.mark.parametrize("name", TABLE_2_METHODS)
@pytest.mark.parametrize("task", LRA)
def test_a_step_changes_every_weight_that_the_loss_depends_on(task, name):
    step = lra_steps.new_training(name, task, setup())
    before = {key: weight.detach().clone() for key, weight in step.model.named_parameters()}
    # Twice: the first update by AdamW has the same size for every gradient except zero.
    for _ in range(2):
        step.step(random_batch(SHORT[task], 2, 0, CPU))
    still = {key for key, weight in step.model.named_parameters() if torch.equal(weight, before[key])}
    # A key's bias adds the same to all scores of a query, and the Reformer's keys are its queries.
    assert all("self.key" in key for key in still)


def test_a_step_of_the_model_is_one_of_a_bare_loop():
    step = lra_steps.new_training("softmax", "text", setup())
    other = build_model("softmax", SHORT["text"], 0).train()
    batch = random_batch(SHORT["text"], 2, 0, CPU)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-4)
    torch.manual_seed(1)
    step.step(batch)
    torch.manual_seed(1)
    other(**batch).loss.backward()
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(step.model.parameters(), other.parameters(), strict=True))


def test_texts_are_padded_and_pictures_are_not():
    for name, task in SHORT.items():
        batch = random_batch(task, 64, 0, CPU)
        assert set(batch) == {"input_ids", "labels"} | ({"attention_mask"} if task.pad_token_id is not None else set())
        assert batch["input_ids"].shape == ((64, 2, 24) if name == "retrieval" else (64, 24))
        if task.pad_token_id is not None:
            lengths = batch["attention_mask"].sum(-1)
            assert lengths.min() >= 6
            assert lengths.max() == 24
            assert torch.equal(batch["attention_mask"], torch.arange(24) < lengths[..., None])
        again = random_batch(task, 64, 0, CPU)
        assert all(torch.equal(batch[key], again[key]) for key in batch)


def test_the_retrieval_model_sees_both_documents():
    model = build_model("softmax", SHORT["retrieval"], 0).eval()
    assert isinstance(model, EncoderForPairClassification)
    batch = random_batch(SHORT["retrieval"], 2, 0, CPU)
    logits = model(**batch).logits
    swapped = {key: x.flip(1) if x.ndim == 3 else x for key, x in batch.items()}
    assert not torch.allclose(model(**swapped).logits, logits)


@pytest.mark.long
def test_what_would_take_too_long_or_too_much_is_not_run(tmp_path, capsys):
    rows = lra_steps.measure_tasks(SMALL["tasks"], setup(limit_seconds=1e-9), tmp_path / "long.csv")
    assert all(math.isnan(row.value) and "would take about" in row.note for row in rows)
    rows = lra_steps.measure_tasks(SMALL["tasks"], setup(free_bytes=lambda device: 1000), tmp_path / "large.csv")
    assert all(math.isnan(row.value) and "needs about" in row.note for row in rows)
    assert "text: softmax is not measured: needs about" in capsys.readouterr().err
    # A batch that the machine cannot hold at all: 2^50 inputs and more.
    rows = lra_steps.measure_tasks(SMALL["tasks"], setup(batch=2**50), tmp_path / "endless.csv")
    assert all(math.isnan(row.value) and row.note for row in rows)


@pytest.mark.long
def test_half_precision_is_autocast(tmp_path):
    rows = lra_steps.measure_tasks(SMALL["tasks"], setup(precision="bfloat16"), tmp_path / "training.csv")
    assert {(row.dtype, row.note) for row in rows} == {("bfloat16", "")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ("txt",)}, "task 'txt' is unknown; expected one of .*Perhaps you meant 'text'"),
        ({"tasks": ()}, "tasks is empty"),
        ({"methods": ("authors-8",)}, "method 'authors-8' is not a method of this library"),
        ({"batch": 0}, "batch is 0"),
        ({"precision": "float16"}, "precision is 'float16'"),
        ({"device": "tpu"}, "device is 'tpu'"),
    ],
)
def test_what_cannot_be_measured_raises_before_any_measurement(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        run_training(TrainingOptions(**SMALL | change, to=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_the_model_is_that_of_the_papers():
    config = build_model("nystrom-8", LRA["listops"], 0).config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (2, 64, 2)
    assert (config.intermediate_size, config.hidden_dropout_prob) == (128, 0.1)
    assert (config.norm, config.pooling) == ("pre", "mean")
    assert config.attention_options == {"num_landmarks": 8}
    assert lra_steps.HIDDEN == 128
