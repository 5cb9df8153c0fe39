"""Hand-made rows of inspections, and the advice about them."""

from dataclasses import replace
from pathlib import Path

import pytest

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.inspection import (
    CHANGED,
    DISTANCE,
    ENTROPY,
    ERROR,
    HIDDEN,
    NEAR,
    RANK,
    RATIO,
    TIME,
    inspection_text,
    layer_errors,
    plan_text,
)

ROW = Row(study="inspect", quantity=ERROR, method="a", value=0, unit="", device="cpu", n=512, repeats=4, command="c")


def rows_of(errors, hidden=None, times=None, exact=(), changed=None, spread=1.02):
    """Errors by method, layer by layer; two heads a layer, .01 below and above; quartiles of times by a factor."""
    rows = [
        replace(ROW, method=method, value=error + off, low=error + off - 0.02, high=error + off + 0.02,
                note="" if error == error else "not finite", facts={"layer": layer, "head": head, "r": 128})
        for method, layers in errors.items() for layer, error in enumerate(layers)
        for head, off in enumerate((-0.01, 0.01))
    ]  # fmt: skip
    for quantity in (ENTROPY, DISTANCE, NEAR, RANK):
        for layer in range(len(next(iter(errors.values())))):
            facts = {"layer": layer, "head": 0, "r": 128}
            rows += [replace(ROW, quantity=quantity, method="softmax", value=0.5, facts=facts)]
    rows += [
        replace(ROW, quantity=HIDDEN, method=name, value=value, note="" if value < 1e9 else "not finite")
        for name, value in (hidden or {}).items()
    ]
    rows += [replace(ROW, quantity=CHANGED, method=name, value=value) for name, value in (changed or {}).items()]
    rows += [
        replace(ROW, quantity=HIDDEN, method=name, value=error, facts={"exact": layers})
        for name, layers, error in exact
    ]
    times = {"softmax": 2.0} | dict.fromkeys(errors, 1.0) | (times or {})
    for name, time in times.items():
        timed = replace(ROW, method=name, repeats=7)
        rows.append(replace(timed, quantity=TIME, value=time, low=time / spread, high=time * spread, unit="ms"))
        for other in times.keys() - {name}:
            ratio = time / times[other]
            of_two = replace(timed, quantity=RATIO, value=ratio, low=ratio / spread, high=ratio * spread)
            rows.append(of_two.with_facts(beside=other))
    return rows


def said(*args, **named):
    text = inspection_text(rows_of(*args, **named), model="my-model")
    assert max(map(len, text.splitlines())) <= 80
    return text, " ".join(text[text.index("\n- ") :].split())


def test_a_layers_error_is_the_mean_of_its_heads_and_of_their_intervals():
    found = layer_errors(rows_of({"a": [0.1, 0.4]}))["a"]
    assert found[0] == pytest.approx((0.1, 0.08, 0.12))
    assert found[1] == pytest.approx((0.4, 0.38, 0.42))


def test_a_near_method_is_to_be_kept():
    text, advice = said({"nystrom-64": [0.05, 0.02]}, {"nystrom-64": 0.04}, changed={"nystrom-64": 0.015})
    assert "nystrom-64 fits this model: the hidden states have a relative error of 0.040. Keep it." in advice
    assert "1.5%" in text
    assert "0.050 ±0.020" in text


def test_a_plan_that_the_model_has_is_a_line_of_errors_alone():
    text, _ = said({"nystrom-64": [0.05, 0.02]}, {"nystrom-64": 0.04, "nystrom_plan": 0.03})
    assert "nystrom_plan   0.030        -      -  -             -\n" in text


def test_ways_out_have_their_error_and_time():
    errors = {"nystrom-64": [0.5, 0.2, 0.6], "nystrom-256": [0.3, 0.1, 0.3], "linear": [1.0, 1.0, 1.0]}
    hidden = {"nystrom-64": 0.5, "nystrom-256": 0.2, "linear": 0.9}
    _, advice = said(errors, hidden, {"nystrom-256": 3.0}, exact=[("nystrom-64", "0,2", 0.12)])
    assert (
        "nystrom-64 has an error above 0.3 in layers 0 2, and the hidden states have a relative error of 0.5" in advice
    )
    assert "nystrom-256: an error of 0.200, at 3.00 times the time of nystrom-64, slower than exact attention" in advice
    # A third of the layers at 1, two thirds at 2.
    assert "with exact attention in layers 0 2: an error of 0.120, at 1.67 times the time of nystrom-64." in advice
    assert "linear:" not in advice


def test_times_are_printed_with_their_quartiles():
    text, _ = said({"nystrom-64": [0.2]}, {"nystrom-64": 0.3}, {"nystrom-64": 12.0, "softmax": 48.0}, spread=1.25)
    assert "Time of a layer's attention, median of 7 turns (and quartiles)" in text
    assert "nystrom-64  12.00 (9.60 to 15.00)   0.25 (0.20 to 0.31)\n" in text
    assert "softmax     48.00 (38.40 to 60.00)  1.00\n" in text


BUSY = ({"a": [0.5], "b": [0.2], "c": [0.1], "far": [0.9]}, {"a": 0.5, "b": 0.2, "c": 0.1, "far": 0.9})
CLOSE_TIMES = {"a": 1.0, "b": 4.6, "c": 5.0, "far": 4.8, "softmax": 5.2}


def test_where_the_turns_do_not_tell_the_faster_the_verdict_says_so_and_draws_no_conclusion():
    _, advice = said(*BUSY, CLOSE_TIMES, spread=1.5)
    assert advice.count("The machine was too busy to tell which is faster: ") == 1
    assert "c or b (0.72 to 1.63 times its time)" in advice
    assert "c or softmax (0.64 to 1.44 times its time)" in advice
    assert "quartiles of 7 turns. Measure again while it does nothing else." in advice
    # The advice names the order of these, or leaves them out.
    assert "a or" not in advice
    assert "far" not in advice
    assert "slower than exact attention" not in said(*BUSY, CLOSE_TIMES | {"c": 5.4}, spread=1.5)[1]
    assert "slower than exact attention" in said(*BUSY, CLOSE_TIMES | {"c": 5.4})[1]


def test_the_turns_of_an_idle_machine_tell_and_nothing_is_said_of_the_machine():
    assert "too busy" not in said(*BUSY, CLOSE_TIMES)[0]
    # Exact attention may be the faster, and a way out is not named where it is not needed.
    _, advice = said({"a": [0.02], "b": [0.01]}, {"a": 0.02, "b": 0.01}, {"a": 1.9, "b": 1.8}, spread=1.5)
    assert "too busy to tell which is faster: a or softmax (0.63 to 1.42 times its time); quartiles" in advice
    assert "as fast" not in advice
    assert "Keep it" not in advice


FOUND = {
    "budget": 0.05, "error": 0.0, "changed predictions": 0.02, "ms of a layer's attention": {"softmax": 2},
    "mean ms of a layer's attention": 1.5, "quartiles of the mean ms": [1.25, 1.75], "too busy to tell": None,
    "held-out error": None, "exact heads": {}, "error without exact heads": None,
}  # fmt: skip


def test_a_plan_is_said_with_its_error_and_time():
    text = plan_text("a in layers 0-1", FOUND, file=Path("x/plan.json"))
    assert "busy" not in text
    doubt = "The machine was too busy to tell which is faster."
    busy = plan_text("a in layers 0-1", FOUND | {"too busy to tell": doubt}, file=Path("x/plan.json"))
    assert f"{doubt} The plan depends on it." in " ".join(busy.split())
    assert max(map(len, text.splitlines())) <= 80
    said = " ".join(text.split())
    error = "The hidden states have a relative error of 0.000 and 2.0% of the predictions change, at"
    assert f"Within a budget of 0.05: a in layers 0-1. {error}" in said
    assert "1.50 ms a layer on average (quartiles 1.25 to 1.75; 2.00 with exact attention)" in said
    assert "plan.json is taken by nystrom convert --plan" in said


def test_exact_heads_and_the_error_on_other_texts_are_said():
    heads = {"exact heads": {"1.1": 0.42, "2.9": 0.31}, "error without exact heads": 0.171, "error": 0.03}
    said = plan_text("a", FOUND | heads | {"held-out error": 0.0412}, file=Path("plan.json"))
    assert max(map(len, said.splitlines())) <= 80
    said = " ".join(said.split())
    assert "1.1 (42%), 2.9 (31%). Without them the error is 0.171." in said
    assert "0.030 (0.041 on texts that it was not chosen by) and 2.0% of the predictions change, at" in said
    over = " ".join(plan_text("a", FOUND | {"held-out error": 0.06}, file=Path("plan.json")).split())
    assert "(0.060 on texts that it was not chosen by, more than the budget: name more with --num-texts)" in over
    assert "Exact heads" not in over


@pytest.mark.parametrize(
    ("rows", "there", "absent"),
    [
        # Errors that add up, and no way out.
        (({"a": [0.2, 0.25], "linear": [1.0, 1.0]}, {"a": 0.3, "linear": 0.9}),
         ("an error above 0.3 in no layer, but the errors add up: the hidden states have a relative error of 0.300.",
          "some with --methods"), ""),
        # An error that is not finite counts as large.
        (({"a": [0.05, float("nan")]}, {"a": float("inf")}), ("an error above 0.3 in layers 1,",), "errors add up"),
        # Exact attention that is as fast is recommended, and a method that is near but slower is not to be kept.
        (({"a": [0.2]}, {"a": 0.3}, {"softmax": 0.9}),
         ("exact attention is as fast as a (0.90 ms a layer, 1.00 with a)",), "Keep it"),
        (({"a": [0.02]}, {"a": 0.01}, {"softmax": 0.9}), (), "Keep it"),
        (({"a": [0.2]}, {"a": 0.3}, {"softmax": 1.1}), (), "as fast"),
        # Without the whole model the layers alone are judged.
        (({"a": [0.2, 0.4]},), ("a has an error above 0.3 in layers 1. Run with the whole model",), "relative"),
        (({"a": [0.2, 0.3]},), ("a has an error above 0.3 in no layer.",), "relative"),
    ],
)  # fmt: skip
def test_the_advice_follows_from_the_errors_and_times(rows, there, absent):
    _, advice = said(*rows)
    assert all(words in advice for words in there)
    assert not absent or absent not in advice


def test_many_methods_and_layers_stay_within_the_terminal():
    errors = {f"skyformer_softmax-{2**i}": [0.5, 0.05] * 12 for i in range(6)}
    text, _ = said(errors, dict.fromkeys(errors, 0.5))
    assert text.count("layer  ") >= 3
    assert "12 layers" in text


def test_rows_without_a_method_raise():
    with pytest.raises(ValueError, match="one method at least"):
        inspection_text([replace(ROW, quantity=TIME)], model="m")
