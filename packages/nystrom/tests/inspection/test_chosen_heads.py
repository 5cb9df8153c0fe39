"""Heads that are chosen to attend exactly, held to the model that runs them."""

import pytest
import torch

from nystrom.attention.plan import AttentionPlan, LayerChoice
from nystrom.inspection import choose_exact_heads
from nystrom.inspection.candidates import SOFTMAX, read_candidates
from nystrom.inspection.head_effects import head_effects
from nystrom.inspection.whole_model import compare_models, exact_results
from nystrom.integrations import set_attention

FEW = {"num_landmarks": 2}


def hidden(model, batch, attention):
    set_attention(model, attention)
    with torch.no_grad():
        return model(**batch).last_hidden_state[batch["attention_mask"].bool()]


def error_of(model, batch, plan):
    came, exact = hidden(model, batch, plan), hidden(model, batch, "sdpa")
    return float((came - exact).norm() / exact.norm())


def test_the_head_that_makes_the_error_is_found(one_head, batch, other_batch):
    plan = choose_exact_heads(one_head, [batch], "nystrom", FEW, num_exact_heads=1, held_out=[other_batch])
    assert plan.layers == (LayerChoice("nystrom", FEW | {"exact_heads": [2]}), LayerChoice("nystrom", FEW))
    assert plan.measurements["exact heads"].keys() == {"0.2"}
    without = AttentionPlan((LayerChoice("nystrom", FEW),) * 2)
    for name, where in (("", batch), ("held-out ", other_batch)):
        assert plan.measurements[f"{name}error"] == pytest.approx(error_of(one_head, where, plan), rel=1e-6)
        wanted = pytest.approx(error_of(one_head, where, without), rel=1e-6)
        assert plan.measurements[f"{name}error without exact heads"] == wanted


def test_effects_add_up_to_the_squared_error_and_say_what_each_head_takes_away(bert, batch):
    """If outputs change little, the error is a sum of the heads' errors a: the effect of one is <sum of all, a>."""
    with torch.no_grad():
        for layer in bert.encoder.layer:
            layer.attention.output.dense.weight *= 1e-4
    (few,) = read_candidates(["nystrom-2"])
    exact = exact_results(bert, [batch])

    def squared(**choice):
        numbers = {None if layer == "others" else int(layer[1:]): each for layer, each in choice.items()}
        return compare_models(bert, [batch], exact, numbers).error ** 2

    effects, before = head_effects(bert, [batch], exact, {None: few}), squared(others=few)
    assert {layer: len(effect) for layer, effect in effects.items()} == {0: 4, 1: 4}
    assert sum(float(effect.sum()) for effect in effects.values()) == pytest.approx(before, rel=1e-2)
    for head in range(4):
        taken = before - squared(others=few, l1=few.with_exact_heads([head]))
        alone = squared(others=SOFTMAX, l1=few.with_exact_heads([each for each in range(4) if each != head]))
        assert taken == pytest.approx(2 * float(effects[1][head]) - alone, abs=1e-2 * before)


def test_at_most_so_many_and_never_a_whole_layer(bert, batch):
    for most in (0, 1, 8):
        plan = choose_exact_heads(bert, [batch], "nystrom", FEW, num_exact_heads=most)
        assert len(plan.measurements["exact heads"]) <= most
        assert all(len(heads) < 4 for heads in plan.exact_heads.values())
        assert plan.measurements["held-out error"] is None
    assert plan.measurements["error"] < plan.measurements["error without exact heads"]


def test_shares_are_what_each_head_takes_away_beside_those_before_it(bert, batch):
    plan = choose_exact_heads(bert, [batch], "nystrom", FEW, num_exact_heads=4)
    shares, without = plan.measurements["exact heads"], plan.measurements["error without exact heads"]
    assert len(shares) > 1
    assert sum(shares.values()) == pytest.approx(1 - (plan.measurements["error"] / without) ** 2, abs=1e-3)
    (few,), exact = read_candidates(["nystrom-2"]), exact_results(bert, [batch])
    error, chosen = without, {}
    for place in shares:
        layer, head = map(int, place.split("."))
        choice = {None: few, **{at: few.with_exact_heads(heads) for at, heads in chosen.items()}}
        effects = head_effects(bert, [batch], exact, choice)
        assert all(effects[at][heads].abs().max() < 1e-12 for at, heads in chosen.items())
        chosen.setdefault(layer, []).append(head)
        choice[layer] = few.with_exact_heads(chosen[layer])
        came = compare_models(bert, [batch], exact, choice).error
        assert shares[place] == pytest.approx((error**2 - came**2) / without**2, abs=1e-4)
        error = came


def test_a_method_that_is_exact_needs_none(bert, batch):
    plan = choose_exact_heads(bert, [batch], "nystrom", {"num_landmarks": 40})
    assert plan.exact_heads == {}
    assert plan.measurements["error"] < 1e-6


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"method": "softmax"}, "method 'softmax' is unknown"),
        ({"options": {"landmarks": 3}}, "landmarks is 3"),
        ({"batches": []}, "batches is empty"),
        ({"num_exact_heads": -1}, "num_exact_heads is -1"),
    ],
)
def test_mistakes_raise(bert, batch, change, says):
    with pytest.raises(ValueError, match=says):
        choose_exact_heads(bert, **{"batches": [batch], "method": "nystrom"} | change)
