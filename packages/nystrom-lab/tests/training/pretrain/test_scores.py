"""Scores beside those of a direct computation."""

import math

import pytest
import torch

from nystrom.models import EncoderConfig
from nystrom.models.heads.language import EncoderForPreTraining
from nystrom_lab.data.language.mlm_sop.dataset import MlmSop
from nystrom_lab.training.pretrain.data import HeldOutInstances
from nystrom_lab.training.pretrain.scores import score_model


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"vocab_size": 12, "pad_token_id": 0, "max_position_embeddings": 24, "pooling": "first"}
    # Large, so that scores differ.
    config = EncoderConfig(initializer_range=0.5, attention_options={"num_landmarks": 8}, **sizes)
    return EncoderForPreTraining(config).eval()


def test_they_are_those_of_all_instances_one_by_one(model, documents):
    held_out = HeldOutInstances(MlmSop(documents, "val", length=24), 30)
    scores = score_model(model, held_out, batch_size=7, device="cpu", precision="float32")
    right = words = order = 0
    losses, order_losses = [], []
    for i in range(len(held_out)):
        batch = held_out.data.collate([held_out[i]])
        with torch.no_grad():
            out = model(**{name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")})
        for token, label in enumerate(batch["labels"][0].tolist()):
            if label != -100:
                logits = out.prediction_logits[0, token]
                words += 1
                right += int(logits.argmax()) == label
                losses.append(-float(logits.log_softmax(-1)[label]))
        swapped = int(batch["sentence_order_label"])
        order += int(out.sop_logits[0].argmax()) == swapped
        order_losses.append(-float(out.sop_logits[0].log_softmax(-1)[swapped]))
    assert (scores.words, scores.instances) == (words, 30)
    assert scores.mlm_accuracy == pytest.approx(right / words)
    assert 0 < right < words
    assert scores.mlm_loss == pytest.approx(sum(losses) / words, rel=1e-5)
    assert scores.perplexity == pytest.approx(math.exp(scores.mlm_loss))
    assert scores.sop_accuracy == pytest.approx(order / 30)
    assert 0 < order < 30
    assert scores.sop_loss == pytest.approx(sum(order_losses) / 30, rel=1e-5)


def test_the_held_out_instances_are_always_the_same(documents):
    one, two = (HeldOutInstances(MlmSop(documents, "val", length=24), 10) for _ in range(2))
    whole = MlmSop(documents, "val", length=24)
    assert one.numbers.tolist() == two.numbers.tolist()
    assert len(one) == 10 < len(whole)
    assert one[3]["input_ids"].tolist() == whole[int(one.numbers[3])]["input_ids"].tolist()
    assert one.lengths.tolist() == [len(one[i]["input_ids"]) for i in range(10)]
