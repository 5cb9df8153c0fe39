from collections import Counter
from pathlib import Path

import pytest

from nystrom_lab.data.language.mlm_sop.dataset import IGNORED, MlmSop
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.pretrain.data import HeldOutInstances
from nystrom_lab.training.results import wilson
from nystrom_papers.studies.reproduce.study import Setting
from nystrom_papers.studies.training.pretrained import GUESS, MLM, SOP, STUDIES, guess_without_context

FIGURE_5, FIGURE_6, LONGER = (
    STUDIES[name] for name in ("nystromformer-figure-5", "nystromformer-figure-6", "supplement-figure-5")
)


def curve(method, quantity, values, *, repeats=40_000, n=256):
    """Rows as a run leaves them: a point each hundred steps, and the results of the best."""
    rows = []
    for number, value in enumerate([*values, values[-1]], start=1):
        low, high = wilson(value, repeats)
        after = "best" if number > len(values) else 100 * number
        row = Row(
            study="", quantity=quantity, method=method, value=value, low=low, high=high, unit="", device="a CPU",
            repeats=repeats, n=n, facts={"layers": 4, "after": after},
        )  # fmt: skip
        rows.append(row)
    return rows


def runs(mlm, sop, **named):
    """Curves of several methods that end at these accuracies, with what else a run measures."""
    rows = []
    for method in mlm:
        rows += curve(method, MLM, [0.1, mlm[method]], **named) + curve(method, SOP, [0.5, sop[method]], **named)
        for quantity, value in (("validation perplexity", 40.0), ("peak memory", 900.0)):
            rows.append(Row(study="", quantity=quantity, method=method, value=value, unit="", device="a CPU",
                                facts={"layers": 4, "after": "best"}))  # fmt: skip
    return rows


def guessed(value):
    """The row of the guess without context."""
    return Row(study="", quantity=GUESS, method="no context", value=value, unit="", device="a CPU",
                   facts={"after": "best"})  # fmt: skip


def agreed(study, mlm, sop, *, guess=0.15, **named):
    return [verdict.agrees for verdict in study.verdicts([guessed(guess), *runs(mlm, sop, **named)])]


GOOD = {"softmax": 0.70, "nystrom": 0.69, "linformer": 0.62, "linear": 0.61}
BELOW = GOOD | {"nystrom": 0.63, "linformer": 0.66}
CHANCE = dict.fromkeys(GOOD, 0.505)
# Intervals of five points that meet.
WIDE = {"repeats": 400}


@pytest.mark.parametrize(
    ("mlm", "sop", "named", "agrees"),
    [
        (GOOD, GOOD, {}, [True, True, True, True]),
        (BELOW, BELOW, {}, [False, False, False, False]),
        (GOOD | {"linformer": 0.68}, GOOD | {"linear": 0.65}, WIDE, [None, None, None, None]),
        # A model that has not learned decides nothing, on either side.
        (GOOD, CHANCE, {}, [True, True, None, None]),
        (GOOD, GOOD, {"guess": 0.695}, [None, None, True, True]),
        (GOOD | {"linear": 0.16}, GOOD | {"softmax": 0.51}, {}, [True, None, None, True]),
    ],
)
def test_figure_5_wants_nystrom_near_exact_attention_and_above_the_others(mlm, sop, named, agrees):
    assert agreed(FIGURE_5, mlm, sop, **named) == agrees


def test_a_verdict_names_what_has_not_learned_and_what_the_convolution_does():
    found = FIGURE_5.verdicts(runs(GOOD | {"linear": 0.13, NO_SKIP: 0.5}, CHANCE | {NO_SKIP: 0.5}))
    assert "No better than a guess of at most 18.0 %: linear." in found[1].numbers
    assert "Without the convolution of the values 50.0 ± 0.5 %." in found[1].numbers
    assert "a guess of 50.0 %: nystrom, softmax." in found[2].numbers
    assert found[1].agrees is None


NO_SKIP = "nystrom, no skip"
WARM = {"softmax": 0.70, "nystrom": 0.69, "nystrom from softmax": 0.69}


@pytest.mark.parametrize(
    ("mlm", "guess", "halfway", "repeats", "agrees"),
    [
        (WARM, 0.15, 0.60, 40_000, True),
        (WARM | {"nystrom from softmax": 0.55}, 0.15, 0.60, 40_000, False),
        # Faster at equal steps, but not in half of them; and too few words.
        (WARM | {"nystrom from softmax": 0.64}, 0.15, 0.60, 40_000, None),
        (WARM | {"nystrom from softmax": 0.66}, 0.15, 0.60, 400, None),
        # The start has learned nothing.
        (WARM | {"softmax": 0.16}, 0.15, 0.60, 40_000, None),
        (WARM | {"nystrom from softmax": 0.55}, 0.69, 0.60, 40_000, None),
    ],
)
def test_figure_6_asks_whether_half_the_steps_from_the_exact_model_suffice(mlm, guess, halfway, repeats, agrees):
    rows = [guessed(guess), *runs(mlm, dict.fromkeys(mlm, 0.8), repeats=repeats)]
    # The run from scratch went on after as many steps as the other took.
    rows = [row for row in rows if not (row.method == "nystrom" and row.quantity == MLM)]
    rows += curve("nystrom", MLM, [0.3, halfway, 0.65, mlm["nystrom"]], repeats=repeats)
    words, _ = FIGURE_6.verdicts([row.with_facts(preset="demo") for row in rows])
    assert words.agrees is agrees
    assert "took 200 steps, the latter 400" in words.numbers


def test_figure_6_judges_the_base_models_where_they_are_not_those_of_figure_5():
    rows = runs(WARM, WARM)
    assert len(FIGURE_6.verdicts([row.with_facts(preset="demo") for row in rows])) == 2
    base = FIGURE_6.verdicts([row.with_facts(preset="bert-base") for row in rows])
    assert [verdict.agrees for verdict in base if "competitive" in verdict.claim] == [True, True]


LONG = {"nystrom": 0.5, "nystrom, longer": 0.60, "nystrom, same length": 0.61}


@pytest.mark.parametrize(
    ("mlm", "sop", "named", "agrees"),
    [
        (LONG, LONG | {"nystrom, longer": 0.70}, {}, [True, True]),
        (LONG | {"nystrom, longer": 0.66}, LONG | {"nystrom, longer": 0.58}, {}, [False, False]),
        (LONG, LONG, WIDE, [None, None]),
        (LONG, dict.fromkeys(LONG, 0.5), {"guess": 0.6}, [None, None]),
    ],
)
def test_longer_sequences_keep_masked_words_and_improve_the_order(mlm, sop, named, agrees):
    assert agreed(LONGER, mlm, sop, **named) == agrees


def test_tables_and_figures_show_every_training():
    mlm = {"softmax": 0.50, "nystrom": 0.49, "linformer": 0.40, "linear": 0.30}
    rows = runs(mlm, mlm)
    [table] = FIGURE_5.tables(rows)
    assert [line[0] for line in table.lines] == list(mlm)
    assert table.lines[0][2:4] == ["200", "50.0 ± 0.5"]
    [figure] = FIGURE_5.figures(rows, Path()).values()
    assert [axes.get_title() for axes in figure.axes] == ["masked words", "sentence order"]
    assert [len(axes.get_lines()) for axes in figure.axes] == [4, 4]


@pytest.fixture
def data(mlm):
    """A folder with a prepared corpus."""
    return mlm.parent


@pytest.mark.parametrize("study", [FIGURE_5, FIGURE_6, LONGER])
def test_what_is_missing_is_said_before_any_work(study, data, tmp_path):
    with pytest.raises(ValueError, match="nystrom data prepare mlm-sop"):
        study.plan(Setting())
    with pytest.raises(ValueError, match="mlm"):
        study.plan(Setting(data=tmp_path))
    plan = study.plan(Setting(data=data))
    assert "precision=bfloat16" in plan.setting["training"]
    assert "precision=float32" in study.plan(Setting(data=data, precision="float32")).setting["training"]
    assert len(plan.parts) >= 4
    assert "AdamW instead of Adam with an L2 term" in plan.differs
    assert plan.setting["data"].endswith("documents, vocabulary of 23")


def test_the_guess_without_context_knows_what_was_left_as_it_is(data, tmp_path):
    [row] = FIGURE_5.plan(Setting(data=data)).parts[0].measure(tmp_path)
    held_out = HeldOutInstances(MlmSop(data / "mlm", "val"), 1024)
    asked = [(int(seen), int(word)) for each in held_out for seen, word in zip(each["input_ids"], each["labels"],
             strict=True) if word != IGNORED]  # fmt: skip
    word, mask = Counter(word for _, word in asked).most_common(1)[0][0], held_out.data.vocabulary.mask_token_id
    right = sum((word if seen == mask else seen) == wanted for seen, wanted in asked)
    assert guess_without_context(held_out) == (row.value, row.repeats) == (right / len(asked), len(asked))
    assert right > sum(wanted == word for _, wanted in asked)


def test_the_papers_size_has_the_papers_settings(data, tmp_path):
    with pytest.raises(ValueError, match="trained BERT-base"):
        FIGURE_6.plan(Setting(size="paper", data=data))
    plan = FIGURE_6.plan(Setting(size="paper", data=data, model=tmp_path))
    assert plan.differs.startswith("the corpus of --data instead of books and Wikipedia")
    assert "AdamW instead of Adam with an L2 term" in plan.differs
    assert plan.setting["training"] == "preset=bert-base"
    assert plan.setting["nystrom-from-softmax"] == "attention=nystrom"
