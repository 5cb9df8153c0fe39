"""Runs: what they learn, that their settings alone decide them, what they leave, and what they do not take."""

import json

import pytest
import torch
from torch.testing import assert_close

from nystrom.models import EncoderForMaskedLM
from nystrom.models.heads.language import EncoderForPreTraining
from nystrom_lab.config import EvaluatePretrainedOptions, PretrainOptions
from nystrom_lab.data.language.mlm_sop.dataset import MlmSop
from nystrom_lab.data.language.tokenizer import load_tokenizer
from nystrom_lab.measure.rows import read_rows
from nystrom_lab.training import compiling
from nystrom_lab.training.pretrain.pretrain import evaluate_mlm_sop, pretrain


@pytest.mark.long
def test_the_loss_falls_on_documents_that_repeat_themselves(short_run, tmp_path, curves):
    changes = {"steps": 30, "evaluate_every": 30, "batch_size": 32, "learning_rate": 1e-2, "dropout": 0.0}
    points = curves(short_run(tmp_path / "run", **changes))
    losses = [value for _, quantity, value in points if quantity == "train loss"]
    accuracy = next(value for _, quantity, value in points if quantity == "validation MLM accuracy")
    assert losses[-1] < 0.8 * losses[0]
    # Seven words are equally frequent.
    assert accuracy > 2 / 7


@pytest.mark.long
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(
    short_run, tmp_path, interrupted, unbroken, weights, curves
):
    interrupted(6, short_run, tmp_path / "run")
    short_run(tmp_path / "run", resume=True)
    broken, whole = weights(tmp_path / "run", 8), weights(unbroken, 8)
    assert all(broken[name].equal(weight) for name, weight in whole.items())
    assert curves(tmp_path / "run") == curves(unbroken)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # A machine of one core warns.
@pytest.mark.long
def test_processes_that_make_batches_change_nothing(short_run, tmp_path, unbroken, weights, curves):
    run = short_run(tmp_path / "run", workers=2)
    found, whole = weights(run, 8), weights(unbroken, 8)
    assert all(found[name].equal(weight) for name, weight in whole.items())
    assert curves(run) == curves(unbroken)


@pytest.mark.long
def test_accumulated_parts_give_the_run_of_the_whole_batch(short_run, tmp_path, weights, curves):
    # Whole documents, 30 to 90 tokens long: the parts differ in how many words are masked.
    changes = {"dropout": 0.0, "length": 96, "batch_size": 16}
    one = short_run(tmp_path / "one", **changes)
    two = short_run(tmp_path / "two", accumulation=4, **changes)
    # float32 sums in another order, over eight steps of Adam.
    assert_close(weights(two, 8), weights(one, 8), rtol=1e-3, atol=1e-5)
    assert [value for *_, value in curves(two)] == pytest.approx([value for *_, value in curves(one)], rel=1e-4)


@pytest.mark.long
def test_a_compiled_encoder_gives_the_run_of_the_plain_one(short_run, tmp_path, monkeypatch, curves):
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    changes = {"attention": "softmax", "options": {}, "conv_kernel_size": 0, "dropout": 0.0, "steps": 3}
    changes |= {"evaluate_every": 3, "warmup_steps": 1}
    runs = (short_run(tmp_path / str(choice), compile=choice, **changes) for choice in (False, True))
    plain, compiled = ([value for *_, value in curves(run)] for run in runs)
    # Sums over another length.
    assert compiled == pytest.approx(plain, rel=1e-3)


@pytest.mark.long
def test_each_pass_draws_new_instances(short_run, documents, tmp_path, after_forward):
    seen = []
    after_forward(
        EncoderForPreTraining,
        lambda model, inputs, _: seen.extend(map(tuple, inputs["input_ids"].tolist())) if model.training else None,
    )
    one_pass = len(MlmSop(documents, "train", length=24)) // 32
    short_run(tmp_path / "run", steps=2 * one_pass, evaluate_every=2 * one_pass, batch_size=32)
    assert len(seen) == 64 * one_pass
    # With the same masks in both passes half of them would be different.
    assert len({*seen}) > 0.9 * len(seen)


def test_the_best_model_has_the_lowest_held_out_loss_and_the_tokenizer(unbroken, documents, curves):
    losses = {step: value for step, quantity, value in curves(unbroken) if quantity == "validation loss"}
    rows = {row.quantity: row for row in read_rows(unbroken / "rows.csv")}
    assert rows["best step"].value == min(losses, key=losses.__getitem__)
    of_words, of_order = (rows[f"validation {name} loss"].value for name in ("MLM", "SOP"))
    assert of_words + of_order == pytest.approx(min(losses.values()))
    assert load_tokenizer(unbroken / "best").get_vocab() == load_tokenizer(documents).get_vocab()


def test_a_saved_model_scores_as_in_its_run(unbroken, documents):
    wanted = {row.quantity: row for row in read_rows(unbroken / "rows.csv")}
    found = evaluate_mlm_sop(
        EvaluatePretrainedOptions(model=unbroken / "best", data=documents, instances=40, batch_size=5, device="cpu")
    )
    assert len(found) == 5
    for row in found:
        assert row.value == pytest.approx(wanted[row.quantity].value, rel=1e-5)
        assert (row.repeats, row.low) == (wanted[row.quantity].repeats, pytest.approx(wanted[row.quantity].low))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "bert"}, "preset 'bert' is unknown"),
        ({"attention": "nystrm"}, "Perhaps you meant 'nystrom'"),
        ({"options": {"num_features": 3}}, "num_features"),
        ({"batch_size": 100_000}, "use a smaller batch"),
        ({"batch_size": 6, "accumulation": 4}, "expected a multiple of 4"),
        ({"length": 7}, "length is 7"),
        ({"warmup_steps": 8}, "warmup_steps is 8"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"hidden_size": 33}, "hidden_size is 33"),
        ({"preset": "longer"}, "name the model with --model"),
        ({"workers": -1}, "workers is -1"),
        ({"instances": 0}, "instances is 0"),
    ],
)
def test_a_wrong_setting_is_named_and_nothing_is_made(short_run, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        short_run(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_the_run(short_run, tmp_path):
    with pytest.raises(FloatingPointError, match="Start another run with a lower --learning-rate"):
        short_run(tmp_path / "run", learning_rate=1e30, dropout=0.0)
    assert not (tmp_path / "run" / "rows.csv").exists()


def test_data_of_another_task_are_named(tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(ValueError, match="nystrom data prepare mlm-sop"):
        pretrain(PretrainOptions(data=tmp_path / "data", preset="demo", to=tmp_path / "run", device="cpu"))


def test_a_model_without_the_order_of_sentences_is_not_scored(unbroken, documents, tmp_path):
    EncoderForMaskedLM.from_pretrained(unbroken / "best").save_pretrained(tmp_path / "words")
    with pytest.raises(ValueError, match="no head for the order of sentences"):
        evaluate_mlm_sop(EvaluatePretrainedOptions(model=tmp_path / "words", data=documents, device="cpu"))


def test_rows_say_how_to_repeat_the_run(unbroken):
    [row] = [row for row in read_rows(unbroken / "rows.csv") if row.quantity == "steps"]
    assert row.command.startswith("nystrom pretrain --data data --preset demo --attention nystrom")
    assert "--options.num-landmarks 8" in row.command
    assert json.loads((unbroken / "run.json").read_text())["method"] == "nystrom-8"
