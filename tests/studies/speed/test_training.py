import math

import pytest
import torch

from nystrom.measure.rows import read_rows
from nystrom.models.heads.pairs import EncoderForPairClassification
from nystrom.studies.speed import lra_models, steps
from nystrom.studies.speed.lra_models import build_model, random_batch
from nystrom.studies.speed.lra_shapes import SHAPES, TABLE_2_METHODS, TaskShape
from nystrom.studies.speed.training import run_training

CPU = torch.device("cpu")
SMALL = {"tasks": ("text", "retrieval"), "methods": ("softmax", "nystrom-8"), "batch": 2, "repeats": 3}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """The tasks with fewer tokens."""
    for name, task in SHAPES.items():
        short = TaskShape(24, task.vocab_size, task.num_labels, task.batch, task.padded, task.documents)
        monkeypatch.setitem(SHAPES, name, short)


def test_the_shapes_are_those_of_the_papers(monkeypatch):
    monkeypatch.undo()
    shapes = {name: (task.n, task.vocab_size, task.num_labels, task.batch) for name, task in SHAPES.items()}
    assert shapes == {
        "listops": (2000, 17, 10, 32),
        "text": (4000, 257, 2, 16),
        "retrieval": (4000, 257, 2, 16),
        "image": (1024, 256, 10, 256),
        "pathfinder": (1024, 256, 2, 128),
    }


def test_rows_hold_each_task_method_and_quantity(tmp_path):
    rows = run_training(**SMALL, seed=3, to=tmp_path)
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
    assert rows[0].sizes.startswith("b=2 documents=1 layers=2 width=64 heads=2 hidden=128 threads=")
    assert "documents=2" in rows[-1].sizes


@pytest.mark.parametrize("name", TABLE_2_METHODS)
@pytest.mark.parametrize("task", SHAPES)
def test_a_step_changes_every_weight_that_the_loss_depends_on(task, name):
    plan = steps.StepSetup((name,), 2, "float32", 1, 0, 1, 60.0, CPU, "")
    step = steps._Training(name, task, plan)
    before = {key: weight.detach().clone() for key, weight in step.model.named_parameters()}
    # Twice: the first update by AdamW has the same size for every gradient but zero.
    for _ in range(2):
        step.step(random_batch(SHAPES[task], 2, 0, CPU))
    still = {key for key, weight in step.model.named_parameters() if torch.equal(weight, before[key])}
    # A key's bias adds the same to all scores of a query, and the Reformer's keys are its queries.
    assert all("self.key" in key for key in still)


def test_a_step_of_the_model_is_one_of_a_bare_loop():
    plan = steps.StepSetup(("softmax",), 2, "float32", 1, 0, 1, 60.0, CPU, "")
    step = steps._Training("softmax", "text", plan)
    other = build_model("softmax", SHAPES["text"], 0).train()
    batch = random_batch(SHAPES["text"], 2, 0, CPU)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-4)
    torch.manual_seed(1)
    step.step(batch)
    torch.manual_seed(1)
    other(**batch).loss.backward()
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(step.model.parameters(), other.parameters(), strict=True))


def test_memory_is_that_of_the_matrices(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "image", TaskShape(256, 256, 10, 2, False))
    asked = {"tasks": ("image",), "methods": ("softmax-materialised", "softmax"), "batch": 2, "repeats": 1}
    rows = {(row.method, row.quantity): row.value for row in run_training(**asked, to=tmp_path)}
    square = 2 * 2 * 256 * 256 * 4 / 1e6
    # The weights of both layers are kept for the backward pass; the fused call keeps a number per query in their place.
    more = rows["softmax-materialised", "image step memory"] - rows["softmax", "image step memory"]
    assert 1.9 * square < more < 4 * square


def test_texts_are_padded_and_pictures_are_not():
    for name, task in SHAPES.items():
        batch = random_batch(task, 64, 0, CPU)
        assert set(batch) == {"input_ids", "labels"} | ({"attention_mask"} if task.padded else set())
        assert batch["input_ids"].shape == ((64, 2, 24) if name == "retrieval" else (64, 24))
        if task.padded:
            lengths = batch["attention_mask"].sum(-1)
            assert lengths.min() >= 6
            assert lengths.max() == 24
            assert torch.equal(batch["attention_mask"], torch.arange(24) < lengths[..., None])
        again = random_batch(task, 64, 0, CPU)
        assert all(torch.equal(batch[key], again[key]) for key in batch)


def test_the_retrieval_model_sees_both_documents():
    model = build_model("softmax", SHAPES["retrieval"], 0).eval()
    assert isinstance(model, EncoderForPairClassification)
    batch = random_batch(SHAPES["retrieval"], 2, 0, CPU)
    logits = model(**batch).logits
    swapped = {key: x.flip(1) if x.ndim == 3 else x for key, x in batch.items()}
    assert not torch.allclose(model(**swapped).logits, logits)


def test_a_run_goes_on_where_it_was_interrupted(tmp_path, monkeypatch, capsys):
    measure = steps.measure_task
    done = []

    def interrupted(task, plan):
        done.append(task)
        if done == ["text", "retrieval"]:
            raise KeyboardInterrupt
        return measure(task, plan)

    monkeypatch.setattr(steps, "measure_task", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_training(**SMALL, to=tmp_path)
    assert "training.csv keeps the tasks that are done" in capsys.readouterr().err
    kept = read_rows(tmp_path / "training.csv")
    rows = run_training(**SMALL, to=tmp_path)
    assert rows[: len(kept)] == kept
    assert done == ["text", "retrieval", "retrieval"]
    assert run_training(**SMALL | {"tasks": ("retrieval",)}, to=tmp_path) == rows[len(kept) :]


def test_another_setting_in_the_same_folder_raises(tmp_path):
    run_training(**SMALL, to=tmp_path)
    before = (tmp_path / "training.csv").read_bytes()
    for change in ({"batch": 4}, {"methods": ("softmax",)}, {"seed": 1}, {"repeats": 2}):
        with pytest.raises(ValueError, match=r"training\.csv holds rows of another setting"):
            run_training(**SMALL | change, to=tmp_path)
        assert (tmp_path / "training.csv").read_bytes() == before


def test_what_would_take_too_long_or_too_much_is_not_run(tmp_path, monkeypatch, capsys):
    rows = run_training(**SMALL, limit_seconds=1e-9, to=tmp_path / "long")
    assert all(math.isnan(row.value) and "would take about" in row.note for row in rows)
    monkeypatch.setattr(steps, "free_bytes", lambda device: 1000)
    rows = run_training(**SMALL, to=tmp_path / "large")
    assert all(math.isnan(row.value) and "needs about" in row.note for row in rows)
    assert "text: softmax is not measured: needs about" in capsys.readouterr().err


def test_half_precision_is_autocast(tmp_path):
    rows = run_training(**SMALL, precision="bfloat16", to=tmp_path)
    assert {(row.dtype, row.note) for row in rows} == {("bfloat16", "")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ("txt",)}, "task 'txt' is unknown; expected one of .*Perhaps you meant 'text'"),
        ({"tasks": ()}, "tasks is empty"),
        ({"methods": ()}, "methods is empty"),
        ({"methods": ("nystrom",)}, "lacks its number of landmarks"),
        ({"methods": ("authors-8",)}, "method 'authors-8' is no method of this library"),
        ({"batch": 0}, "batch is 0"),
        ({"repeats": 0}, "repeats is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"limit_seconds": 0}, "limit_seconds is 0"),
        ({"precision": "float16"}, "precision is 'float16'"),
        ({"device": "tpu"}, "device is 'tpu'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        run_training(**SMALL | change, to=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_model_is_that_of_the_papers():
    config = build_model("nystrom-8", SHAPES["listops"], 0).config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (2, 64, 2)
    assert (config.intermediate_size, config.hidden_dropout_prob, config.norm, config.pooling) == (
        128,
        0.1,
        "pre",
        "mean",
    )
    assert config.attention_options == {"num_landmarks": 8}
    assert lra_models.HIDDEN == 128
