"""A NaN or infinity, in a model, in what it gives or in rows, ends each command that would tell a number from it.

In one line, with exit code 2.
"""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertForSequenceClassification

from nystrom.models import EncoderConfig, EncoderForPreTraining, EncoderForSequenceClassification
from nystrom_lab.cli.main import main
from nystrom_lab.measure.rows import Row, append_rows, read_rows

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
LRA_RUN = "lra run --tasks listops --methods softmax --data {work} --preset demo --device cpu --to"
# The input of each command, and its words.
MODELS = {
    "predict": ("classifier", "--model {model} --data {texts}"),
    "evaluate": ("listops", "listops --model {model} --data {data}"),
    "evaluate mlm-sop": ("pretrained", "--model {model} --data {mlm}"),
    "inspect": ("bert", "{model} --texts {text} --num-texts 2 --methods nystrom-4"),
    "convert": ("bert", "{model} --to {to}"),
    "export": ("listops", "{model} --to {to}.onnx"),
    "finetune": ("bert", "--model {model} --data {labelled} --to {to}"),
    "train": ("listops", "listops --model {model} --data {data} --preset demo --to {to}"),
    "pretrain": ("pretrained", "--model {model} --data {mlm} --length 32 --to {to}"),
    "lra run": ("listops", "--tasks listops --methods softmax --model {model} --data {work} --preset demo --to {to}"),
    "reproduce": ("bert", "skyformer-figure-1 --model {model} --texts {text} --to {to}"),
}
# Files of rows, by the words of the command that reads them.
ROWS = {
    **{f"report {study} {{file}}": "" for study in ("efficiency", "engines", "model", "training")},
    "report study {file} --study complexity": "",
    "lra table {file}": "",
    "lra table {file} --time": "",
    "bench efficiency --to {to}": "efficiency.csv",
    "bench model --to {to}": "model.csv",
    "bench training --to {to}": "training.csv",
    f"{LRA_RUN} {{to}}": "lra.csv",
    "reproduce complexity --to {to}/..": "rows.csv",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory, data, tiny_bert, prose, mlm):
    """Models and data by their names in the words of commands."""
    work = tmp_path_factory.mktemp("work")
    (work / "listops-demo").symlink_to(data)
    (work / "texts.txt").write_text("a river\nthe stone and the road in summer\n")
    lines = "".join(f"the {'river' if i % 2 else 'stone'},{'ab'[i % 2]}\n" for i in range(40))
    (work / "labelled.csv").write_text(f"text,label\n{lines}")
    torch.manual_seed(0)
    shutil.copytree(tiny_bert, work / "bert")
    BertForSequenceClassification.from_pretrained(tiny_bert).save_pretrained(work / "classifier")
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    tokenizer.save_pretrained(work / "classifier")
    of_task = {"task": "listops", "vocab_size": 17, "num_labels": 10, "max_position_embeddings": 64}
    EncoderForSequenceClassification(EncoderConfig(**SIZES, **of_task)).save_pretrained(work / "listops")
    of_words = {"vocab_size": len(tokenizer), "max_position_embeddings": 32}
    EncoderForPreTraining(EncoderConfig(**SIZES, **of_words)).save_pretrained(work / "pretrained")
    tokenizer.save_pretrained(work / "pretrained")
    named = {"texts": work / "texts.txt", "labelled": work / "labelled.csv", "text": prose, "mlm": mlm, "data": data}
    return named | {"work": work}


def one_line(capsys, words):
    """The only line of a command that ends with exit code 2 and prints no result."""
    code = main(words)
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("nystrom: ")]
    assert (code, len(lines), err.splitlines()[-1:]) == (2, 1, lines), (code, out, err)
    assert "nan" not in out
    return lines[0]


def changed(places, name, to, change):
    """A copy of a model whose weights are changed."""
    shutil.copytree(places["work"] / name, to)
    weights = load_file(to / "model.safetensors")
    change(weights)
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize("number", [torch.nan, -torch.inf])
@pytest.mark.parametrize("command", MODELS)
def test_a_model_with_a_number_that_is_not_finite_is_not_used(command, number, places, tmp_path, capsys):
    def spoil(weights):
        weights[max(weights)].view(-1)[-1] = number

    kind, words = MODELS[command]
    model = changed(places, kind, tmp_path / "broken", spoil)
    said = one_line(capsys, [*command.split(), *words.format(model=model, to=tmp_path / "out", **places).split()])
    assert f"{model / 'model.safetensors'} holds numbers that are not finite, for example in " in said


@pytest.mark.parametrize(
    ("command", "names", "says"),
    [
        ("predict", ["classifier.weight"], "the outputs of the model are not finite"),
        ("evaluate", ["classifier."], "the outputs of the model are not finite"),
        ("evaluate mlm-sop", ["cls."], "the outputs of the model are not finite"),
        ("evaluate mlm-sop", ["sop."], "the outputs of the model are not finite"),
        ("inspect", ["encoder.layer.1.attention.self.query.weight"], "layer encoder.layer.1.attention.self gets"),
        ("inspect", ["encoder.layer.2.output.dense.weight"], "the hidden states of BertModel with exact attention"),
    ],
)
def test_a_model_whose_numbers_overflow_predicts_nothing(command, names, says, places, tmp_path, capsys):
    def enlarge(weights):
        for name, weight in weights.items():
            if name.startswith(tuple(names)):
                weight.fill_(3e38)

    kind, words = MODELS[command]
    model = changed(places, kind, tmp_path / "large", enlarge)
    assert says in one_line(capsys, [*command.split(), *words.format(model=model, **places).split()])


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("train listops --data {data} --preset demo --attention softmax", EncoderForSequenceClassification),
        ("finetune --model {work}/bert --data {labelled}", BertForSequenceClassification),
    ],
)
def test_a_validation_with_an_infinite_logit_scores_nothing(words, kind, places, tmp_path, capsys, monkeypatch):
    """The loss stays finite if another class is the true one."""
    forward = kind.forward

    def overflow(self, *given, **named):
        out = forward(self, *given, **named)
        if not self.training:
            out.logits[:, -1] = -torch.inf
            out.loss = out.logits[:, 0].mean()
        return out

    monkeypatch.setattr(kind, "forward", overflow)
    words = f"{words} --steps 2 --batch-size 4 --device cpu --to {tmp_path / 'run'}"
    assert "the outputs of the model are not finite (-inf, for " in one_line(capsys, words.format(**places).split())
    assert not (tmp_path / "run" / "rows.csv").exists()


@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize("words", ROWS)
def test_a_row_with_a_number_that_is_not_finite_is_named(words, number, places, tmp_path, capsys):
    to = tmp_path / "complexity-small"
    file = to / (ROWS[words] or "rows.csv")
    row = Row(study="s", quantity="time", method="softmax", value=1.25, unit="ms", device="cpu")
    append_rows(file, [row])
    file.write_text(file.read_text().replace("1.25", number))
    before = file.read_bytes()
    said = one_line(capsys, words.format(file=file, to=to, **places).split())
    assert f"{file.name}, line 2: value of time of softmax is {number}, and note is empty" in said
    assert file.read_bytes() == before


@pytest.mark.parametrize("option", [[], ["--time"]])
def test_a_mean_over_seeds_takes_no_row_that_was_not_measured(option, tmp_path, capsys):
    row = Row(study="train listops", quantity="test accuracy", method="softmax", value=0.5, unit="", device="cpu")
    rows = [row, replace(row, quantity="training time", unit="s")]
    append_rows(tmp_path / "lra.csv", [replace(each, value=torch.nan, note="it broke", seed=3) for each in rows])
    assert all(each.note for each in read_rows(tmp_path / "lra.csv"))
    said = one_line(capsys, ["lra", "table", str(tmp_path / "lra.csv"), *option])
    assert "of softmax on listops with seed 3 is nan (it broke)" in said
