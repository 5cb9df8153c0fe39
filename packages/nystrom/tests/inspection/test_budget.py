"""The cheapest method of each layer within a budget, held to the model that runs it."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, BertConfig, BertForSequenceClassification

from nystrom.attention.plan import AttentionPlan, LayerChoice
from nystrom.inspection import choose_plan, whole_model
from nystrom.inspection.times import Times
from nystrom.integrations import set_attention

METHODS = ["nystrom-2", "nystrom-8", "nystrom-16", "softmax"]
SECONDS = {"nystrom-2": 1.0, "nystrom-8": 2.0, "nystrom-16": 4.0, "softmax": 10.0}


def error_of(model, batch, plan):
    """The error of the model with a plan, by its own attention."""
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        set_attention(model, "sdpa")
        exact = model(**batch).last_hidden_state[real]
        set_attention(model, plan)
        came = model(**batch).last_hidden_state[real]
    set_attention(model, "sdpa")
    return float((came - exact).norm() / exact.norm())


def cost(plan):
    """The cost of a plan with four heads in each layer."""
    total = 0.0
    for method, options in plan.layers:
        exact = 1.0 if method == "softmax" else len(options.get("exact_heads", ())) / 4
        total += exact * SECONDS["softmax"]
        total += (1 - exact) * SECONDS.get(f"nystrom-{options.get('num_landmarks')}", 0.0)
    return total


@pytest.mark.parametrize("budget", [0.05, 0.2, 0.35, 0.6])
def test_the_plan_keeps_the_budget_and_no_cheaper_layer_would(bert, batch, budget):
    plan = choose_plan(bert, [batch], budget=budget, methods=METHODS, seconds=SECONDS)
    assert plan.measurements["error"] == pytest.approx(error_of(bert, batch, plan), rel=1e-6)
    assert plan.measurements["error"] <= budget
    assert plan.measurements["mean ms of a layer's attention"] == pytest.approx(1e3 * cost(plan) / 2)


def test_less_error_costs_more_and_the_ends_are_the_cheapest_and_exact(bert, batch):
    plans = [
        choose_plan(bert, [batch], budget=budget, methods=METHODS, seconds=SECONDS) for budget in (1e-9, 0.1, 0.4, 10)
    ]
    costs = [cost(plan) for plan in plans]
    assert costs == sorted(costs, reverse=True)
    assert plans[0].layers == (LayerChoice("softmax", {}),) * 2
    assert plans[-1].layers == (LayerChoice("nystrom", {"num_landmarks": 2}),) * 2
    assert len({str(plan) for plan in plans}) > 2


def test_what_is_dearer_than_exact_attention_is_never_chosen(bert, batch):
    seconds = SECONDS | {"softmax": 1.5}
    plan = choose_plan(bert, [batch], budget=1e-3, methods=METHODS, seconds=seconds)
    assert plan.layers == (LayerChoice("softmax", {}),) * 2


def test_a_budget_that_nothing_meets_names_what_comes_nearest(bert, batch):
    with pytest.raises(ValueError, match=r"budget is 1e-06, .* the closest is an error of 0\.\d+ with nystrom-8 in"):
        choose_plan(bert, [batch], budget=1e-6, methods=METHODS[:2], seconds=SECONDS, num_exact_heads=0)
    assert bert.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("most", [0, 1, 2, 8])
@pytest.mark.parametrize("budget", [0.25, 0.4])
def test_heads_are_exact_where_that_is_cheaper_than_whole_layers(bert, batch, other_batch, budget, most):
    asked = {"budget": budget, "methods": METHODS, "seconds": SECONDS, "held_out": [other_batch]}
    plan = choose_plan(bert, [batch], num_exact_heads=most, **asked)
    measured, heads = (
        plan.measurements,
        {f"{layer}.{head}" for layer, some in plan.exact_heads.items() for head in some},
    )
    assert len(heads) <= most
    assert measured["exact heads"].keys() == heads
    assert all(0 < share <= 1 for share in measured["exact heads"].values())
    assert measured["error"] == pytest.approx(error_of(bert, batch, plan), rel=1e-6)
    assert measured["held-out error"] == pytest.approx(error_of(bert, other_batch, plan), rel=1e-6)
    assert measured["mean ms of a layer's attention"] == pytest.approx(1e3 * cost(plan) / 2)
    plain = [LayerChoice(m, {k: v for k, v in o.items() if k != "exact_heads"}) for m, o in plan.layers]
    without = measured["error without exact heads"]
    assert without == (pytest.approx(error_of(bert, batch, AttentionPlan(tuple(plain))), rel=1e-6) if heads else None)
    assert not heads or without > budget
    if most:
        assert cost(plan) <= cost(choose_plan(bert, [batch], num_exact_heads=0, **asked))


def test_a_head_that_makes_the_error_is_found(one_head, batch):
    plan = choose_plan(one_head, [batch], budget=0.1, methods=METHODS[:1], seconds=SECONDS)
    assert plan.exact_heads == {0: (2,)}
    assert plan.measurements["exact heads"]["0.2"] > 0.9
    assert plan.measurements["error without exact heads"] > 3 * plan.measurements["error"]


def test_a_method_whose_results_are_not_finite_meets_no_budget(bert, batch, monkeypatch):
    attend = whole_model.attend_by

    def broken(method, call, options):
        return attend(method, call, options) * (torch.nan if options.get("num_landmarks") == 2 else 1.0)

    monkeypatch.setattr(whole_model, "attend_by", broken)
    plan = choose_plan(bert, [batch], budget=10.0, methods=METHODS, seconds=SECONDS)
    assert plan.layers == (LayerChoice("nystrom", {"num_landmarks": 8}),) * 2
    assert plan.measurements["error"] <= 10
    with pytest.raises(ValueError, match="the closest is an error of inf"):
        choose_plan(bert, [batch], budget=10.0, methods=METHODS[:1], seconds=SECONDS)


def test_the_times_of_an_inspection_are_taken_and_the_plan_has_their_quartiles(bert, batch):
    turns = {"nystrom-2": [1.0, 3.0, 2.0], "nystrom-16": [4.0, 4.0, 5.0], "softmax": [9.0, 12.0, 10.0]}
    plan = choose_plan(bert, [batch], budget=10, methods=["nystrom-2", "nystrom-16"], seconds=Times(turns))
    measured = plan.measurements
    assert measured["ms of a layer's attention"] == {"nystrom-2": 2000, "softmax": 10000}
    assert measured["quartiles of these ms"] == {"nystrom-2": [1500, 2500], "softmax": [9500, 11000]}
    assert measured["mean ms of a layer's attention"] == 2000
    assert measured["quartiles of the mean ms"] == [1500, 2500]
    assert measured["turns"] == 3
    assert measured["too busy to tell"] is None


def test_an_order_that_the_plan_depends_on_and_the_turns_leave_open_is_named(bert, batch):
    # In three turns of five nystrom-8 was the faster, nystrom-2 in the others; both far from the rest.
    turns = {"nystrom-2": [2.0, 2.0, 2.0, 9.0, 9.0], "nystrom-8": [9.0, 9.0, 1.0, 2.5, 2.5]}
    turns |= {"nystrom-16": [30.0] * 5, "softmax": [40.0] * 5}
    for taken, busy in ((turns, True), (turns | {"nystrom-8": [1.0] * 5}, False)):
        plan = choose_plan(bert, [batch], budget=10, methods=METHODS, seconds=Times(taken))
        if busy:
            assert plan.measurements["too busy to tell"] == (
                "The machine was too busy to tell which is faster: nystrom-2 or nystrom-8 (0.22 to 3.60 times its "
                "time); quartiles of 5 turns. Measure again while it does nothing else."
            )
        else:
            assert plan.measurements["too busy to tell"] is None
    # Exact attention everywhere, whatever is faster below it.
    plan = choose_plan(bert, [batch], budget=1e-9, methods=METHODS, seconds=Times(turns))
    assert plan.measurements["too busy to tell"] is None


def test_times_are_measured_and_predictions_counted(sizes, batch):
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(num_labels=3, **sizes)).train()
    measured = choose_plan(model, [batch], budget=10, methods=["nystrom-4"]).measurements
    assert set(measured["ms of a layer's attention"]) == {"nystrom-4", "softmax"}
    assert 0 <= measured["changed predictions"] <= 1
    assert model.training


def test_local_layers_keep_exact_attention():
    config = AutoConfig.for_model(
        "modernbert", vocab_size=40, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=24,
        local_attention=8, global_attn_every_n_layers=2, bos_token_id=2, cls_token_id=2, eos_token_id=3, sep_token_id=3,
        pad_token_id=1,
    )  # fmt: skip
    model = AutoModel.from_config(config).eval()
    batch = {"input_ids": torch.randint(40, (1, 30)), "attention_mask": torch.ones(1, 30)}
    plan = choose_plan(model, [batch], budget=10, methods=["nystrom-4"])
    assert [layer.method for layer in plan.layers] == ["nystrom", "softmax", "nystrom", "softmax"]
    assert error_of(model, batch, plan) == pytest.approx(plan.measurements["error"], rel=1e-3)


def test_mistakes_raise(bert, batch):
    for change, says in (
        ({"budget": 0}, "budget"),
        ({"methods": []}, "methods is empty"),
        ({"seconds": {"nystrom-2": 1.0}}, "seconds lacks"),
        ({"batches": []}, "batches is empty"),
        ({"num_exact_heads": -1}, "num_exact_heads is -1"),
    ):
        asked = {"batches": [batch], "budget": 0.1, "methods": METHODS} | change
        with pytest.raises(ValueError, match=says):
            choose_plan(bert, asked.pop("batches"), **asked)
