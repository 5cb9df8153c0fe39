"""Logits that an interrupted scoring kept are used only if they are whole and of this model."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import BertForSequenceClassification

from nystrom_lab.data.language.labelled.splits import TextSplit
from nystrom_lab.data.language.tokenizer import load_tokenizer
from nystrom_lab.training.finetune import inference
from nystrom_lab.training.finetune.encoding import EncodedSplit, collator, padding_of


@pytest.fixture
def half_scored(bert, tmp_path, monkeypatch):
    """A function that scores 20 texts, and the file that it kept of the first 8."""
    monkeypatch.setattr(inference, "_BETWEEN", 0.0)
    torch.manual_seed(0)
    model = BertForSequenceClassification.from_pretrained(bert).eval()
    tokenizer, kept = load_tokenizer(bert), tmp_path / "predictions" / "test-step3.safetensors"
    texts = [f"good film {'the plot ' * (i % 7)}" for i in range(20)]
    split = EncodedSplit(TextSplit(texts, None, None), tokenizer, max_length=48, segments=False)
    shared = {"batch_size": 8, "device": "cpu", "precision": "float32"}

    def score(model=model):
        return inference.logits_of(model, split, collator(padding_of(tokenizer)), kept=kept, **shared)

    def write(*given, inner=inference._write):
        inner(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(inference, "_write", write)
        with pytest.raises(KeyboardInterrupt):
            score()
    assert len(load_file(kept)["logits"]) == 8
    return score, kept, model


def flip(kept):
    """Change the sign of the last number of a file."""
    content = bytearray(kept.read_bytes())
    content[-1] ^= 0x80
    kept.write_bytes(content)


def with_old_sums(change):
    """Put other numbers into a file, under the sums of its own."""

    def spoil(kept):
        with safe_open(kept, "pt") as file:
            logits, said = file.get_tensor("logits"), file.metadata()
        save_file({"logits": change(logits)}, kept, metadata=said)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        flip,
        lambda kept: kept.write_bytes(kept.read_bytes()[:-3]),
        lambda kept: kept.write_bytes(b"PK"),
        lambda kept: save_file({"logits": torch.zeros(8, 2)}, kept),
        with_old_sums(lambda x: x[:0]),
        with_old_sums(lambda x: torch.zeros(8, 5)),
        with_old_sums(lambda x: x.fill_(torch.nan)),
    ],
)
def test_kept_logits_that_are_damaged_are_told_and_scored_again(half_scored, spoil, capsys):
    score, kept, _ = half_scored
    sound = score()
    spoil(kept)
    capsys.readouterr()
    np.testing.assert_array_equal(score(), sound)
    said = capsys.readouterr().err
    assert said.startswith(f"warning: {kept} is skipped: ")
    assert said.endswith("; its texts are scored again.\n")


def test_kept_logits_of_other_weights_are_not_taken(half_scored, capsys):
    score, kept, model = half_scored
    other = deepcopy(model)
    with torch.no_grad():
        other.classifier.weight.neg_()
    np.testing.assert_allclose(score(other), -score(model), rtol=0, atol=1e-6)
    assert f"{kept} is skipped: it is of another model" in capsys.readouterr().err
