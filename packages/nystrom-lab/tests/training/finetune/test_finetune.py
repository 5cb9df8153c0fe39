"""A fine-tuned model, its predictions and its rows; resuming; and errors, which come before anything is trained."""

import csv
import errno
import json
import math
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import BertTokenizer, DistilBertConfig, DistilBertModel, pipeline

from nystrom.attention.plan import AttentionPlan, LayerChoice
from nystrom.command_options import ConvertOptions
from nystrom.integrations import check_attention
from nystrom.integrations.convert import convert
from nystrom.models import EncoderConfig, EncoderForSequenceClassification
from nystrom.whole_files import NotWritten
from nystrom_lab.cli.main import main
from nystrom_lab.config import PredictOptions
from nystrom_lab.measure.rows import read_rows
from nystrom_lab.training.finetune import run as run_module
from nystrom_lab.training.finetune.predict import SavedClassifier, predict
from nystrom_lab.training.finetune.results import write_predictions
from nystrom_lab.whole_folders import write_sums


def table(path, delimiter="\t"):
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


def texts_of(films, name):
    lines = (films / f"{name}.tsv").read_text().splitlines()[1:]
    return [line.split("\t")[name == "test"] for line in lines]


@pytest.mark.long
def test_the_run_leaves_a_model_predictions_and_rows(whole, films):
    rows = {row.quantity: row for row in read_rows(whole / "rows.csv")}
    true = table(whole / "predictions" / "validation.tsv")
    right = sum(row["label"] == row["true label"] for row in true) / len(true)
    assert rows["validation accuracy"].value == pytest.approx(right)
    assert rows["validation accuracy"].repeats == len(true) == 20
    assert rows["steps"].value == 6
    assert (rows["validation accuracy"].method, rows["validation accuracy"].m) == ("nystrom-4", 4)
    longer = sum(len(text.split()) + 2 > 4 for text in texts_of(films, "dev")) / 20
    assert rows["validation texts longer than nystrom-4"].value == pytest.approx(longer)
    submitted = table(whole / "predictions" / "SST-2.tsv")
    said = table(whole / "predictions" / "submission.tsv")
    assert [row["index"] for row in submitted] == [str(i) for i in range(10)]
    assert [row["prediction"] for row in submitted] == [{"negative": "0", "positive": "1"}[r["label"]] for r in said]
    assert not {"train.tsv"} & {path.name for path in (whole / "predictions").iterdir()}


def test_the_saved_model_attends_by_the_method_after_loading(whole):
    saved = SavedClassifier(whole / "best", device="cpu", precision="float32")
    use = check_attention(saved.model, {"input_ids": torch.randint(5, 14, (1, 20))})
    assert use.method == "nystrom"
    assert list(use.layers.values()) == [{"num_landmarks": 4}] * 2
    assert use.exact == ()


@pytest.mark.parametrize(
    ("positions", "kept", "read"), [("rotary", 640, 640), ("rotary", None, 512), ("learned", 640, 48)]
)
def test_as_many_tokens_are_read_as_the_fine_tuning_kept(bert, tmp_path, positions, kept, read):
    torch.manual_seed(0)
    config = EncoderConfig(
        vocab_size=14, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=48, positions=positions,
    )  # fmt: skip
    EncoderForSequenceClassification(config).save_pretrained(tmp_path)
    more = {} if kept is None else {"model_max_length": kept}
    BertTokenizer(vocab=str(bert / "vocab.txt"), **more).save_pretrained(tmp_path)
    assert SavedClassifier(tmp_path, device="cpu", precision="float32").max_length == read


def test_predict_says_what_the_pipeline_says_in_the_order_of_the_texts(whole, films, tmp_path):
    out = tmp_path / "out.tsv"
    assert (
        predict(PredictOptions(model=str(whole / "best"), data=films / "test.tsv", to=out, batch_size=3, device="cpu"))
        == 10
    )
    classify = pipeline("text-classification", model=str(whole / "best"), device="cpu")
    wanted = classify(texts_of(films, "test"))
    rows = table(out)
    assert [row["index"] for row in rows] == [str(i) for i in range(10)]
    assert [row["label"] for row in rows] == [entry["label"] for entry in wanted]
    # Rounded to six places; batches of other lengths are padded.
    assert [float(row["probability"]) for row in rows] == pytest.approx([e["score"] for e in wanted], abs=2e-6)


def test_the_splits_and_classes_are_printed_before_the_model_is_read(tuned, tmp_path, capsys):
    with pytest.raises(ValueError, match="expected a folder, or OWNER"):
        tuned(tmp_path / "run", model=str(tmp_path / "gone"))
    said = capsys.readouterr().out
    assert "train 48, validation 20, submission 10; 2 classes: 'negative' 34, 'positive' 34.\n" in said


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"learning_rate": math.nan}, "learning_rate is nan; expected a positive"),
        ({"seed": -1}, "seed is -1; expected"),
        ({"accumulation": 0}, "accumulation is 0; expected"),
        ({"resume": True}, "run holds no run to resume"),
        ({}, "run is not empty and holds no run: choose"),
    ],
)
def test_numbers_and_the_folder_are_refused_before_the_texts_are_read(tuned, tmp_path, capsys, changes, match):
    if not changes:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "notes").touch()
    with pytest.raises(ValueError, match=match):
        tuned(tmp_path / "run", **changes)
    assert not capsys.readouterr().out


def test_predict_counts_the_texts_with_other_bytes_than_utf_8(whole, tmp_path, capsys):
    (tmp_path / "texts.txt").write_bytes("good\ncafé\n".encode("latin-1"))
    assert (
        predict(
            PredictOptions(
                model=str(whole / "best"), data=tmp_path / "texts.txt", to=tmp_path / "out.tsv", device="cpu"
            )
        )
        == 2
    )
    assert "1 rows of" in (said := capsys.readouterr().err)
    assert "texts.txt hold bytes that are not UTF-8, which became \ufffd (the first: 1)." in said


@pytest.mark.long
def test_an_interrupted_run_ends_as_an_unbroken_one(whole, tuned, tmp_path, interrupted):
    interrupted(5, tuned, tmp_path / "run")
    with pytest.raises(ValueError, match=r"learning_rate is 0\.002 but was 0\.001"):
        tuned(tmp_path / "run", resume=True, learning_rate=2e-3)
    assert_equal_runs(tuned(tmp_path / "run", resume=True), whole)


def test_a_run_does_not_go_on_with_another_tokenizer(whole, tuned, bert, tmp_path):
    run, model = shutil.copytree(whole, tmp_path / "run"), shutil.copytree(bert, tmp_path / "bert")
    (run / "rows.csv").unlink()
    tokenizer = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(tokenizer.replace('"good": 5', '"good": 6').replace('"bad": 6', '"bad": 5'))
    with pytest.raises(ValueError, match="other settings: the tokenizer of its model changed"):
        tuned(run, model=str(model), resume=True)
    # An earlier version recorded the weights alone.
    record = json.loads((run / "run.json").read_text())
    record["settings"]["weights"] = record["settings"]["weights"].partition("-")[0]
    (run / "run.json").write_text(json.dumps(record))
    for checkpoint in run.glob("checkpoint-*"):
        (checkpoint / "run.json").write_text(json.dumps(record))
        write_sums(checkpoint)
    assert tuned(run, resume=True) == run


@pytest.mark.long
def test_a_run_that_ended_while_it_was_scored_is_scored_again(whole, tuned, tmp_path, monkeypatch):
    def full_disk(path, *given):
        if path.name.startswith("submission"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_predictions(path, *given)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "write_predictions", full_disk)
        with pytest.raises(NotWritten, match=r"submission.tsv cannot be written \(No space.*continue with --resume"):
            tuned(run)
    tuned(run, resume=True)
    assert_equal_runs(run, whole)


def assert_equal_runs(run, whole):
    """Same weights, predictions and rows, except time and memory."""
    weights = [load_file(folder / "best" / "model.safetensors") for folder in (run, whole)]
    assert_close(*weights, rtol=0, atol=0)
    predictions = [
        {path.name: path.read_bytes() for path in (folder / "predictions").iterdir()} for folder in (run, whole)
    ]
    assert predictions[0] == predictions[1]
    assert {"validation.tsv", "submission.tsv", "SST-2.tsv"} == {*predictions[0]}
    both = [read_rows(folder / "rows.csv") for folder in (run, whole)]
    timed = ("s", "MB")
    rows = [[replace(row, command="", value=row.value * (row.unit not in timed)) for row in each] for each in both]
    assert rows[0] == rows[1]
    curves = [[row | {"seconds": ""} for row in table(folder / "curves.csv", ",")] for folder in (run, whole)]
    assert curves[0] == curves[1]


# Fine-tunes as the arguments say, and is killed before the fifth step.
KILLED = """
import os, signal, sys
from pathlib import Path
from nystrom_lab.cli.main import main
import torch
from nystrom_lab.training.run_trainer import RunTrainer
torch.set_num_threads(int(sys.argv.pop()))
inner = RunTrainer.training_step
def training_step(self, *given):
    if self.state.global_step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return inner(self, *given)
RunTrainer.training_step = training_step
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_killed_run_in_bfloat16_ends_as_an_unbroken_one(bert, films, tmp_path):
    def words(to):
        given = f"finetune sst2 --attention nystrom --num-landmarks 4 --steps 6 --batch-size 8 --evaluate-every 3 \
            --learning-rate 1e-3 --device cpu --precision bfloat16 --model {bert} --data {films} --to {to}"
        return given.split()

    # The threads of both, which share a sum.
    arguments = [*words(tmp_path / "run"), str(torch.get_num_threads())]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]
    assert main(words(tmp_path / "whole")) == 0
    assert main([*words(tmp_path / "run"), "--resume"]) == 0
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")


@pytest.mark.long
def test_accumulation_gives_the_weights_of_the_whole_batch(tuned, bert, tmp_path):
    plain = tmp_path / "plain"
    shutil.copytree(bert, plain)
    config = json.loads((plain / "config.json").read_text()) | {"hidden_dropout_prob": 0.0}
    (plain / "config.json").write_text(json.dumps(config))
    one, two = (tuned(tmp_path / str(parts), model=str(plain), accumulation=parts) for parts in (1, 2))
    weights, others = (load_file(run / "checkpoint-6" / "model.safetensors") for run in (one, two))
    # Softmax has no use for the bias of the keys: its gradient is rounding alone, which Adam makes a step of.
    names = [name for name in weights if not name.endswith("key.bias")]
    # float32 sums in another order, over six steps of Adam.
    assert_close([others[name] for name in names], [weights[name] for name in names], rtol=1e-3, atol=2e-4)
    # The loss, which the Trainer multiplies by the parts for a model that it takes for one with a summed loss.
    losses, same = ([row["value"] for row in table(run / "curves.csv", ",")] for run in (one, two))
    assert [float(loss) for loss in same] == pytest.approx([float(loss) for loss in losses], rel=1e-3)


@pytest.mark.long
def test_the_models_of_this_library_are_tuned_on_pairs_with_numbers(tuned, bert, pairs_of_films, tmp_path):
    convert(ConvertOptions(bert, tmp_path / "own", num_landmarks=4, conv_kernel_size=3))
    run = tuned(
        tmp_path / "run", None, model=str(tmp_path / "own"), data=(pairs_of_films,), attention=None, options=None,
        text_field="one", pair_field="two", label_field="likeness",
    )  # fmt: skip
    quantities = {row.quantity for row in read_rows(run / "rows.csv")}
    assert {"test correlation", "test Spearman correlation", "test root mean squared error"} <= quantities
    model = EncoderForSequenceClassification.from_pretrained(run / "best")
    assert (model.config.num_labels, model.config.attention_options) == (1, {"num_landmarks": 4})
    out = tmp_path / "out.jsonl"
    given = {"model": str(run / "best"), "data": pairs_of_films / "test.jsonl", "to": out, "device": "cpu"}
    with pytest.raises(ValueError, match="--pair-field"):
        predict(PredictOptions(**given))
    predict(PredictOptions(**given, text_field="one", pair_field="two"))
    said = [json.loads(line)["prediction"] for line in out.read_text().splitlines()]
    wanted = [float(row["prediction"]) for row in table(run / "predictions" / "test.tsv")]
    assert said == pytest.approx(wanted, rel=1e-4)


def test_a_published_nystromformer_is_tuned_with_the_landmarks_asked_for(tuned, published, bert, tmp_path):
    _, folder = published("ForMaskedLM", vocab_size=14, num_landmarks=16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bert / name, folder / name)
    run = tuned(tmp_path / "run", model=str(folder), attention=None, options={"num_landmarks": 6}, steps=3)
    config = EncoderForSequenceClassification.from_pretrained(run / "best").config
    assert (config.attention, config.attention_options["num_landmarks"]) == ("nystrom", 6)
    assert config.id2label == {0: "negative", 1: "positive"}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.long
def test_a_plan_is_trained_with_and_comes_back_with_the_model(own, tuned, bert, tmp_path):
    layers = (LayerChoice("softmax", {}), LayerChoice("nystrom", {"num_landmarks": 4}))
    AttentionPlan(layers).write(tmp_path / "plan.json")
    if own:
        convert(ConvertOptions(bert, tmp_path / "own"))
    folder = tmp_path / "own" if own else bert
    plain = {"attention": None, "options": None}
    run = tuned(tmp_path / "run", model=str(folder), plan=tmp_path / "plan.json", steps=3, **plain)
    model = SavedClassifier(run / "best", device="cpu", precision="float32").model
    if own:
        assert [model.config.layer_attention(layer) for layer in range(2)] == list(layers)
    else:
        use = check_attention(model, {"input_ids": torch.randint(5, 14, (1, 20))})
        assert list(use.methods.values()) == ["nystrom"]
        assert use.exact == ("bert.encoder.layer.0.attention.self",)
    (row,) = (row for row in read_rows(run / "rows.csv") if row.quantity == "steps")
    assert row.method.startswith("nystrom_plan")
    assert "--plan plan.json" in row.command
    # And as the start of another run, with what its folder says.
    again = tuned(tmp_path / "again", model=str(run / "best"), steps=3, **plain)
    assert read_rows(again / "rows.csv")[0].method.startswith("nystrom_plan")
    with pytest.raises(ValueError, match="leave one out"):
        tuned(tmp_path / "none", plan=tmp_path / "plan.json")
    AttentionPlan(layers[:1]).write(tmp_path / "short.json")
    with pytest.raises(ValueError, match=r"the plan has 1 layers but .* has 2"):
        tuned(tmp_path / "none", model=str(folder), plan=tmp_path / "short.json", **plain)
    assert not (tmp_path / "none").exists()


@pytest.mark.refuses
def test_a_plan_that_would_not_come_back_with_the_model_is_told_before_anything_is_trained(tuned, bert, tmp_path):
    folder = shutil.copytree(bert, tmp_path / "distilbert")
    config = DistilBertConfig(
        vocab_size=14, dim=32, n_layers=2, n_heads=4, hidden_dim=32, max_position_embeddings=48, attention_dropout=0.0
    )
    DistilBertModel(config).save_pretrained(folder)
    AttentionPlan((LayerChoice("nystrom", {"num_landmarks": 4}),) * 2).write(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="could not find the layers of its plan"):
        tuned(tmp_path / "run", model=str(folder), plan=tmp_path / "plan.json", attention=None, options=None, steps=3)
    assert not list(tmp_path.glob("run/**/model.safetensors"))


def test_what_is_wrong_is_said_before_anything_is_trained(tuned, bert, films, tmp_path):
    def says(match, to=tmp_path / "run", **changes):
        with pytest.raises(ValueError, match=match) as raised:
            tuned(to, **changes)
        assert "\n" not in str(raised.value)
        assert not (tmp_path / "run").exists()

    broken, other, part = (shutil.copytree(bert, tmp_path / name) for name in ("no weights", "other words", "part"))
    (broken / "model.safetensors").unlink()
    says("holds no model.safetensors", model=str(broken))
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"] |= {f"word{i}": 14 + i for i in range(9)}
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    says("has 23 tokens but the model 14", model=str(other))
    weights = load_file(part / "model.safetensors")
    weights.pop(next(name for name in weights if "layer.1" in name))
    save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    says("does not fit its config.json", model=str(part))
    says("max_length is 64 but model .* has 48 positions", max_length=64)
    says("method is 'linformer'", attention="linformer", options=None)
    says("num_landmarks is given for exact attention", attention=None)
    says("epochs is 2 and steps is 6", epochs=2)
    says(r"train\.tsv, line 1: .* no 'words' among the fields 'sentence', 'label': name the", text_field="words")
    outside = shutil.copytree(films, tmp_path / "outside")
    with (outside / "dev.tsv").open("a") as file:
        file.write("a film\tgreat\n")
    says(r"dev\.tsv, line 22: the label is 'great', which is not one of the classes", data=(outside,))
    says("task is on pairs", task="mrpc")
    says("task is on pairs", task="mrpc", text_field="sentence", label_field="label")
    says("single texts: leave it out", pair_field="other")
    says("labels is 'numbers', but sst2 has fixed labels", labels="numbers")
    says("48 training texts", batch_size=64)
    says("threads is 0", threads=0)
    says("seed is 4294967296", seed=2**32)


def test_predict_says_what_is_wrong(whole, bert, films, tmp_path):
    for match, changes in (
        ("not a text classifier", {"model": str(bert)}),
        ("which is not a folder", {"model": "none"}),
        ("single texts: leave it out", {"pair_field": "other"}),
        ("there is no 'words' among", {"text_field": "words"}),
        ("ends in .tsv", {"to": tmp_path / "out.xls"}),
        ("is not a file", {"data": tmp_path / "none"}),
        ("threads is 0", {"threads": 0}),
    ):
        with pytest.raises(ValueError, match=match):
            predict(
                PredictOptions(
                    **({"model": str(whole / "best"), "data": films / "test.tsv", "device": "cpu"} | changes)
                )
            )
    assert not list(tmp_path.iterdir())


def test_a_submission_is_written_for_the_test_split_as_it_came_alone(tuned, films, tmp_path):
    dev = shutil.copytree(films, tmp_path / "dev only", ignore=shutil.ignore_patterns("train.tsv"))
    run = tuned(tmp_path / "run", data=(dev,), steps=2, evaluate_every=2)
    # 16 rows for training, two each for validation and a test with labels; the ten of test.tsv have none.
    written = [len(table(run / "predictions" / f"{name}.tsv")) for name in ("validation", "test", "submission")]
    assert written == [2, 2, 10]
    assert len(table(run / "predictions" / "SST-2.tsv")) == 10
    assert all("splits=own" in row.words for row in read_rows(run / "rows.csv"))
