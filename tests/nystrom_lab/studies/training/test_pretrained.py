from pathlib import Path

import pytest

from nystrom_lab.data.language.mlm_sop.task import prepare_mlm_sop
from nystrom_lab.measure.rows import new_row
from nystrom_lab.studies.reproduce.study import Setting
from nystrom_lab.studies.training.pretrained import MLM, SOP, STUDIES
from nystrom_lab.training.results import wilson

FIGURE_5, FIGURE_6, LONGER = (
    STUDIES[name] for name in ("nystromformer-figure-5", "nystromformer-figure-6", "supplement-figure-5")
)


def curve(method, quantity, values, *, repeats=10_000, n=256):
    """Rows as a run leaves them: a point each hundred steps, and the results of the best."""
    rows = []
    for number, value in enumerate([*values, values[-1]], start=1):
        low, high = wilson(value, repeats)
        after = "best" if number > len(values) else 100 * number
        row = new_row(
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
            rows.append(
                new_row(
                    study="",
                    quantity=quantity,
                    method=method,
                    value=value,
                    unit="",
                    device="a CPU",
                    facts={"layers": 4, "after": "best"},
                )
            )
    return rows


def agreed(study, mlm, sop, **named):
    return [verdict.agrees for verdict in study.verdicts(runs(mlm, sop, **named))]


def test_figure_5_wants_nystrom_near_exact_attention_and_above_the_others():
    good = {"softmax": 0.50, "nystrom": 0.49, "linformer": 0.40, "linear": 0.30}
    assert agreed(FIGURE_5, good, good | {"softmax": 0.80, "nystrom": 0.79}) == [True, True, True, True]
    far = good | {"nystrom": 0.47, "linformer": 0.48}
    assert agreed(FIGURE_5, far, far | {"softmax": 0.80}) == [False, False, False, False]
    # Intervals that meet do not tell which is above.
    close = good | {"linformer": 0.485}
    assert agreed(FIGURE_5, close, close, repeats=1000)[1] is None


def test_where_none_learns_the_order_of_sentences_it_decides_nothing():
    mlm = {"softmax": 0.50, "nystrom": 0.49, "linformer": 0.40, "linear": 0.30}
    chance = dict.fromkeys(mlm, 0.495)
    assert agreed(FIGURE_5, mlm, chance) == [True, True, None, None]
    assert "none above chance" in FIGURE_5.verdicts(runs(mlm, chance))[2].numbers


def test_figure_6_asks_whether_half_the_steps_from_the_exact_model_suffice():
    start = {"softmax": 0.50, "nystrom": 0.49, "nystrom from softmax": 0.52}
    assert agreed(FIGURE_6, start, start | {"softmax": 0.6}) == [True, True, False, True]
    worse = start | {"nystrom from softmax": 0.45}
    assert agreed(FIGURE_6, worse, worse)[1] is False


def test_longer_sequences_keep_masked_words_and_improve_the_order():
    mlm = {"nystrom": 0.3, "nystrom, longer": 0.50, "nystrom, same length": 0.51}
    assert agreed(LONGER, mlm, mlm | {"nystrom, longer": 0.70}) == [True, True]
    assert agreed(LONGER, mlm | {"nystrom, longer": 0.55}, mlm) == [False, False]


def test_a_study_that_is_not_complete_cannot_tell():
    rows = curve("nystrom", MLM, [0.2, 0.3])
    assert {verdict.agrees for verdict in FIGURE_5.verdicts(rows)} == {None}


def test_tables_and_figures_show_every_training():
    mlm = {"softmax": 0.50, "nystrom": 0.49, "linformer": 0.40, "linear": 0.30}
    rows = runs(mlm, mlm)
    [table] = FIGURE_5.tables(rows)
    assert [line[0] for line in table.lines] == list(mlm)
    assert table.lines[0][2:4] == ["200", "50.0 ± 1.0"]
    [figure] = FIGURE_5.figures(rows, Path()).values()
    assert [axes.get_title() for axes in figure.axes] == ["masked words", "sentence order"]
    assert [len(axes.get_lines()) for axes in figure.axes] == [4, 4]


@pytest.fixture(scope="module")
def data(tiny_bert, prose, tmp_path_factory):
    """A folder with a prepared corpus."""
    folder = tmp_path_factory.mktemp("data")
    text = folder / "documents.txt"
    text.write_text(prose.read_text().replace("\n", "\n\n"))
    prepare_mlm_sop([text], folder / "mlm", tokenizer=tiny_bert, length=32, workers=1, progress=False)
    return folder


@pytest.mark.parametrize("study", [FIGURE_5, FIGURE_6, LONGER])
def test_what_is_missing_is_said_before_any_work(study, data, tmp_path):
    with pytest.raises(ValueError, match="nystrom data prepare mlm-sop"):
        study.plan(Setting())
    with pytest.raises(ValueError, match="mlm"):
        study.plan(Setting(data=tmp_path))
    plan = study.plan(Setting(data=data))
    assert "precision=bfloat16" in plan.setting["training"]
    assert "precision=float32" in study.plan(Setting(data=data, precision="float32")).setting["training"]
    assert len(plan.parts) >= 3
    assert plan.differs
    assert plan.setting["data"].endswith("documents, vocabulary of 23")


def test_the_papers_size_has_the_papers_settings(data, tmp_path):
    with pytest.raises(ValueError, match="trained BERT-base"):
        FIGURE_6.plan(Setting(size="paper", data=data))
    plan = FIGURE_6.plan(Setting(size="paper", data=data, model=tmp_path))
    assert plan.differs.startswith("the corpus of --data instead of books and Wikipedia")
    assert plan.setting["training"] == "preset=bert-base"
    assert plan.setting["nystrom-from-softmax"] == "attention=nystrom"
