"""The fixed values of the norm before a classification head are those of all that was run."""

import pytest
import torch
from torch.testing import assert_close

from nystrom.models import EncoderConfig, EncoderForSequenceClassification
from nystrom.models.parts.modern import pooled_norms
from nystrom_lab.training.pooled import measure_pooled

# Sums of some hundred numbers of size 1 in float64.
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def make(kind=EncoderForSequenceClassification, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3}
    sizes |= {"intermediate_size": 12, "max_position_embeddings": 40, "attention_options": {"num_landmarks": 5}}
    return kind(EncoderConfig(**(sizes | {"pooled_norm": "batch", "initializer_range": 0.3} | changes))).double()


def draw_tokens(*shape, seed=1):
    return torch.randint(0, 17, shape, generator=torch.Generator().manual_seed(seed))


def test_the_fixed_values_are_those_of_all_that_was_run_without_dropout():
    model, ids = make(hidden_dropout_prob=0.3).train(), draw_tokens(20, 12)
    seen = []
    hook = pooled_norms(model)[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    # Parts of different sizes, so that a mean of their means would be another.
    measure_pooled(model, (model(part) for part in ids.split(8)))
    hook.remove()
    assert model.training
    pooled, norm = torch.cat(seen), pooled_norms(model)[0]
    assert [len(part) for part in seen] == [8, 8, 4]
    assert_close(norm.running_mean, pooled.mean(dim=0), **CLOSE)
    assert_close(norm.running_var, pooled.var(dim=0, correction=0), **CLOSE)
    model.eval()
    seen.clear()
    model.classifier.dense.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(ids)
    assert_close(seen[0].mean(dim=0), torch.zeros(16, dtype=torch.float64), **CLOSE)


def test_that_nothing_was_measured_is_said():
    model = make()
    with pytest.raises(ValueError, match="no sequence reached the norm of the pooled tokens"):
        measure_pooled(model, [])
    assert pooled_norms(model)[0].running_mean.eq(0).all()
