import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertForSequenceClassification, BertTokenizer

from nystrom_lab.measure.rows import Row
from nystrom_lab.training.run_folder import RunFolder
from nystrom_papers.studies.reproduce.study import Setting
from nystrom_papers.studies.training import finetuned
from nystrom_papers.studies.training.by_length import rows_by_length
from nystrom_papers.studies.training.finetuned import PAPER, SMALL, STUDIES
from nystrom_papers.studies.training.finetuned_report import SHARE, error_beside, scores
from nystrom_papers.studies.training.runs import Training
from nystrom_papers.studies.training.swapped import swapped_rows

TABLE_2, TABLE_1 = STUDIES["nystromformer-table-2"], STUDIES["supplement-table-1"]
METRICS = {"mrpc": "F1", "qqp": "F1"}


def result(task, method, value, *, split="test", seed=0, texts=1000, kind="run", n=512, facts=None):
    return Row(
        study="", quantity=f"{split} {METRICS.get(task, 'accuracy')}", method=method, value=value, unit="",
        repeats=texts, seed=seed, n=n, device="a CPU",
        facts={"model": "m", **(facts or {}), "task": task, "kind": kind},
    )  # fmt: skip


def share(task, m, value):
    return Row(
        study="", quantity=f"test {SHARE}", method="nystrom", value=value, unit="", m=m, n=512,
        facts={"task": task, "kind": "lengths"}, device="a CPU",
    )  # fmt: skip


def test_a_score_is_that_of_the_test_texts_or_of_validation_where_they_have_no_labels():
    rows = [result("mrpc", "softmax", 0.9, split="validation"), result("mrpc", "softmax", 0.8)]
    rows += [result("mrpc", "softmax", 0.84, seed=1)]
    rows += [result("sst2", "softmax", 0.91, split="validation", texts=872)]
    mrpc, sst2 = scores(rows).values()
    assert mrpc.value == pytest.approx(0.82)
    assert mrpc.fact("shown") == "82.0 ± 2.8 (2)"
    assert (sst2.value, sst2.repeats, sst2.fact("split")) == (0.91, 872, "validation")


def test_the_mismatched_texts_of_mnli_are_lines_of_their_own_beside_their_printed_scores():
    rows = [share("mnli", 64, 0.3), share("sst2", 64, 0.3)]
    for task, split, score in (
        ("mnli", "test", 0.7), ("mnli", "validation_mismatched", 0.6), ("sst2", "test", 0.9)
    ):  # fmt: skip
        for method, gain in (("softmax", 0.0), ("nystrom-64", 0.02)):
            rows.append(result(task, method, score + gain, split=split, facts={"splits": "own"}))
    lines = [[*line[:3], *line[5:]] for line in TABLE_2.tables(rows)[0].lines]
    assert lines == [
        ["mnli", "softmax", "test, own", "70.0", "", "82.4"],
        ["mnli", "nystrom-64", "test, own", "72.0", "+2.0", "80.9"],
        ["mnli mismatched", "softmax", "validation", "60.0", "", "82.4"],
        ["mnli mismatched", "nystrom-64", "validation", "62.0", "+2.0", "82.2"],
        ["sst2", "softmax", "test, own", "90.0", "", "90.0"],
        ["sst2", "nystrom-64", "test, own", "92.0", "+2.0", "91.4"],
    ]
    # A verdict is of the task.
    assert ["mismatched" in verdict.claim for verdict in TABLE_2.verdicts(rows)] == [False, False]
    longer = [replace(row, n=1024) for row in rows]
    found = {tuple(line[:2]): line[5] for line in TABLE_1.tables(longer)[0].lines}
    assert found["mnli mismatched", "nystrom-64"] == "81.4"


def test_a_mean_is_over_the_seeds_of_one_precision_that_of_most():
    runs = [result("mrpc", "softmax", value, seed=seed) for seed, value in enumerate((0.8, 0.84, 0.86))]
    mixed = [replace(run, dtype=dtype) for run, dtype in zip(runs, ("bfloat16", "float32", "float32"), strict=True)]
    for rows in (mixed, mixed[::-1]):
        (score,) = scores(rows).values()
        assert score.value == pytest.approx(0.85)


def test_a_test_is_ours_unless_it_has_all_texts_of_the_published_one():
    cases = (("imdb", 25_000), ("imdb", 4_000), ("qnli", 546))
    for (task, n), split in zip(cases, ("test", "test, own", "test, own"), strict=True):
        (score,) = scores([result(task, "softmax", 0.9, texts=n, facts={"splits": "own"})]).values()
        assert score.fact("split") == split


def test_nystrom_attention_is_competitive_within_two_points_where_the_errors_and_the_texts_say_so():
    rows = [share("imdb", 64, 0.3), result("imdb", "softmax", 0.88, texts=25_000)]
    # The standard error of a difference of two shares of .88 over 25,000 texts is .0029.
    for value, agrees in ((0.867, True), (0.865, None), (0.855, None), (0.853, False), (0.90, True)):
        [verdict] = TABLE_2.verdicts([*rows, result("imdb", "nystrom-64", value, texts=25_000)])
        assert verdict.agrees is agrees
    few = [result("imdb", method, 0.88, texts=500) for method in ("softmax", "nystrom-64")]
    [verdict] = TABLE_2.verdicts([rows[0], *few])
    assert verdict.agrees is None
    short = [share("imdb", 64, 0.05), *rows[1:], result("imdb", "nystrom-64", 0.88, texts=25_000)]
    [verdict] = TABLE_2.verdicts(short)
    assert verdict.agrees is None


@pytest.mark.parametrize(("task", "guess"), [("imdb", 0.5), ("mnli", 1 / 3), ("mrpc", 2 * 0.67 / 1.67)])
def test_exact_attention_that_has_not_learned_decides_nothing(task, guess):
    for exact, agrees in ((guess + 0.1, False), (guess + 0.001, None)):
        rows = [share(task, 64, 0.9)]
        rows += [
            result(task, method, value, texts=25_000) for method, value in (("softmax", exact), ("nystrom-64", 0.3))
        ]
        [verdict] = TABLE_2.verdicts(rows)
        assert verdict.agrees is agrees
        assert ("no better than a guess" in verdict.numbers) is (agrees is None)


@pytest.mark.parametrize(("task", "found", "missed", "wrong"), [("mrpc", 0.6, 0.07, 0.16), ("imdb", 0.4, 0.1, 0.1)])
def test_the_standard_error_is_that_of_drawn_texts(task, found, missed, wrong):
    g = torch.Generator().manual_seed(0)
    shares = torch.tensor([found, missed, wrong, 1 - found - missed - wrong])
    kinds = torch.multinomial(shares.expand(4000, -1), 1725, replacement=True, generator=g)
    t, m, w, r = (torch.stack([(kinds == kind).sum(1) for kind in range(4)])).double()
    drawn = 2 * t / (2 * t + m + w) if task == "mrpc" else (t + r) / 1725
    (score,) = scores([result(task, "softmax", drawn.mean().item(), texts=1725)]).values()
    # The number of texts found is that of the positives, up to a tenth: the formula takes them as equal.
    assert error_beside(score, score) == pytest.approx(2**0.5 * drawn.std().item(), rel=0.1)


def test_the_size_nearest_to_the_papers_decides():
    of = partial(result, "qqp", texts=100_000)
    rows = [share("qqp", 32, 0.4), share("qqp", 16, 0.9), of("softmax", 0.8)]
    rows += [of("nystrom-16", 0.5), of("nystrom-32", 0.8)]
    [verdict] = TABLE_2.verdicts(rows)
    assert verdict.agrees is True
    assert "nystrom-32" in verdict.numbers


@pytest.mark.parametrize(
    ("value", "texts", "searched", "agrees"),
    [(0.83, 100_000, True, True), (0.81, 100_000, True, False), (0.83, 400, True, None), (0.83, 100_000, False, None)],
)
def test_a_search_is_judged_beside_one_of_exact_attention(value, texts, searched, agrees):
    rows = [result("mrpc", "softmax", 0.90, texts=texts)]
    found = {"nystrom-32": value} | ({"softmax": 0.84} if searched else {})
    rows += [result("mrpc", method, score, kind="search", texts=texts) for method, score in found.items()]
    [verdict] = TABLE_2.verdicts(rows)
    assert verdict.agrees is agrees
    assert ("was not searched" in verdict.numbers) is not searched


def test_the_search_is_shown_by_its_test_score():
    texts = 100_000
    rows = [
        result("mrpc", "softmax", 0.84, texts=texts),
        result("mrpc", "nystrom-32", 0.83, kind="search", texts=texts),
    ]
    for batch, value in ((8, 0.80), (16, 0.85)):
        sizes = {"batch_size": batch, "learning_rate": "2e-05"}
        trial = result("mrpc", "nystrom-32", value, split="validation", kind="search", facts=sizes)
        rows.append(replace(trial, quantity="validation F1 of a trial"))
    table = TABLE_2.tables(rows)[-1]
    assert table.lines == [["nystrom-32", "8", "2e-05", "80.0", ""], ["nystrom-32", "16", "2e-05", "85.0", "83.0"]]


def test_what_a_swap_of_attentions_changes_is_beside_training_with_it():
    rows = [result("imdb", "softmax", 0.90, kind="swapped"), result("imdb", "near_far", 0.89, kind="swapped")]
    rows += [result("imdb", "softmax", 0.90), result("imdb", "near_far", 0.91)]
    for method, changed in (("softmax", 0.0), ("near_far", 0.025)):
        row = result("imdb", method, changed, kind="swapped")
        rows.append(replace(row, quantity="test predictions that change"))
    table = TABLE_2.tables(rows)[-1]
    assert table.lines == [
        ["imdb", "softmax", "90.0", "+0.0", "0.0", "90.0"],
        ["imdb", "near_far", "89.0", "-1.0", "2.5", "91.0"],
    ]


def test_short_and_long_texts_are_scored_apart(tmp_path):
    lengths = np.array([1, 128, 129, 256, 300, 511, 512, 512])
    right = {"softmax": (1, 1, 1, 1, 1, 1, 1, 0), "nystrom-64": (1, 1, 1, 0, 1, 0, 0, 0)}
    rows, file = [], tmp_path
    for method, those in right.items():
        lines = "".join(f"{i}\t{'pos' if r else 'neg'}\t0.9\tpos\n" for i, r in enumerate(those))
        file = tmp_path / f"{method}.tsv"
        file.write_text(f"index\tlabel\tprobability\ttrue label\n{lines}")
        sizes = {"model": "m", "task": "imdb", "kind": "by-length"}
        rows += rows_by_length(file, lengths, split="test", method=method, precision="float32", facts=sizes)
    assert [row.repeats for row in rows] == [2, 2, 2, 2] * 2
    table = TABLE_2.tables(rows)[-1]
    assert table.lines == [
        ["softmax", "100.0", "100.0", "100.0", "50.0"],
        ["nystrom-64", "100.0 (+0.0)", "50.0 (-50.0)", "50.0 (-50.0)", "0.0 (-50.0)"],
    ]
    assert table.heads[1:3] == ["to 128 tokens (2)", "to 256 tokens (2)"]
    with pytest.raises(ValueError, match="has 8 texts, but the data have 7: it is of other data"):
        list(rows_by_length(file, lengths[:7], split="test", method="m", precision="float32", facts={}))


def test_the_study_scores_the_first_run_of_each_attention_by_length(tiny_bert, tmp_path, monkeypatch):
    (tmp_path / "imdb").mkdir()
    texts = ["river " * n for n in (3, 200, 20, 500)]
    for name in ("train", "test"):
        lines = (json.dumps({"text": text, "label": i % 2}) + "\n" for i, text in enumerate(texts))
        (tmp_path / "imdb" / f"{name}.jsonl").write_text("".join(lines))
    plan = TABLE_2.plan(Setting(data=tmp_path, model=tiny_bert))
    found = []

    def trained(training, runs):
        found.append(training.name)
        path = runs / training.name / "predictions"
        path.mkdir(parents=True)
        # The second text alone is wrong.
        right = "".join(f"{i}\t{1 - i % 2 if i == 1 else i % 2}\t.9\t{i % 2}\n" for i in range(4))
        (path / "test.tsv").write_text(f"index\tlabel\tprobability\ttrue label\n{right}")
        return RunFolder(path.parent)

    monkeypatch.setattr(finetuned, "train", trained)
    [part] = (part for part in plan.parts if part.name.endswith("by-length"))
    assert part.name == "imdb-by-length"
    rows = list(part.measure(tmp_path / "study"))
    methods = ["softmax", "nystrom-64", "nystrom-32", "near_far"]
    assert found == [f"imdb-{method}-seed0" for method in methods]
    values = {"1 to 128": (2, 1.0), "129 to 256": (1, 0.0), "257 to 511": (1, 1.0)}
    assert [(row.method, row.quantity, row.repeats, row.value) for row in rows] == [
        (method, f"test accuracy of texts of {bounds} tokens", *value)
        for method in methods
        for bounds, value in values.items()
    ]


def test_the_attention_of_a_trained_model_is_swapped(tiny_bert, tmp_path):
    words = ["river", "stone", "map", "road"]
    lines = "".join(f"{' '.join(words[: 1 + i % 4] * (1 + i % 5))}\t{i % 2}\n" for i in range(40))
    (tmp_path / "dev.tsv").write_text(f"sentence\tlabel\n{lines}")
    (tmp_path / "train.tsv").write_text("sentence\tlabel\nriver map\t0\nroad\t1\n")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertForSequenceClassification.from_pretrained(tiny_bert).save_pretrained(tmp_path / "best")
    BertTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path / "best")
    methods = ("softmax", "nystrom-2", "nystrom-64")

    rows = swapped_rows(tmp_path / "best", "sst2", tmp_path, methods, name="tiny", precision="float32")
    found = {(row.method, row.quantity): row.value for row in rows}
    assert found["softmax", "validation predictions that change"] == 0
    # A landmark for each token is exact.
    assert found["nystrom-64", "validation predictions that change"] == 0
    assert found["nystrom-64", "validation accuracy"] == found["softmax", "validation accuracy"]
    assert 0 <= found["nystrom-2", "validation predictions that change"] <= 1


def test_longer_positions_are_compared_with_512_both_ways():
    cases = ((0.90, 0.90, True), (0.90, 0.86, False), (0.90, 0.94, False), (0.501, 0.501, None))
    for short, long, agrees in cases:
        of = [(method, *of) for method in ("softmax", "nystrom-64") for of in ((short, 512), (long, 1024))]
        rows = [result("imdb", method, value, texts=25_000, n=n) for method, value, n in of]
        assert [verdict.agrees for verdict in TABLE_1.verdicts(rows)] == [agrees]
    few = [result("imdb", "nystrom-64", 0.90, texts=400, n=n) for n in (512, 1024)]
    assert [verdict.agrees for verdict in TABLE_1.verdicts(few)] == [None]


def test_a_figure_has_the_runs_whose_other_one_is_there(tmp_path):
    rows = [result("imdb", "softmax", 0.9), result("imdb", "nystrom-64", 0.88), result("qqp", "nystrom-16", 0.7)]

    def drawn(rows):
        [axes] = TABLE_2.figures(rows, tmp_path)[""].axes
        return [label.get_text() for label in axes.get_yticklabels()], len(axes.containers)

    assert drawn(rows) == (["imdb"], 1)
    long = [result("imdb", method, 0.9, n=1024) for method in ("softmax", "nystrom-64", "near_far")]
    assert drawn([*rows, *long]) == (["imdb"], 2)
    assert TABLE_2.figures(rows[:1], tmp_path) == {}


def test_tables_have_a_line_for_each_attention_and_name_what_is_equal_by_construction():
    rows = [share("sst2", 64, 0.0), share("mrpc", 64, 0.001), share("sst2", 16, 0.6), share("sst2", 32, 0.1)]
    # Exact attention is first in the table, whichever run ended first.
    values = (("nystrom-16", 0.88), ("softmax", 0.9), ("near_far", 0.9))
    rows += [result("sst2", name, value, texts=872) for name, value in values]
    [table] = TABLE_2.tables(rows)
    assert table.title.endswith("with 64 landmarks exact, since no text is longer: sst2")
    assert table.lines[1] == ["sst2", "nystrom-16", "test", "872", "60", "88.0", "-2.0", "91.4"]
    # The paper has no number for it.
    assert table.lines[2][-1] == ""
    [figure] = TABLE_2.figures(rows, Path()).values()
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["sst2"]


def test_what_is_missing_is_said_before_any_work(tiny_bert, tmp_path):
    with pytest.raises(ValueError, match="name the folder that holds their data with --data"):
        TABLE_2.plan(Setting(model=tiny_bert))
    with pytest.raises(ValueError, match="holds no folder of imdb"):
        TABLE_1.plan(Setting(model=tiny_bert, data=tmp_path))
    (tmp_path / "mrpc").mkdir()
    names = [part.name for part in TABLE_2.plan(Setting(model=tiny_bert, data=tmp_path)).parts]
    assert names[0] == "lengths"
    assert len(names) == 1 + 3 * len(SMALL["mrpc"].methods) + 2
    (tmp_path / "imdb").mkdir()
    names = [part.name for part in TABLE_1.plan(Setting(model=tiny_bert, data=tmp_path)).parts]
    runs = [f"imdb{more}-{method}-seed0" for more in ("", "-1024") for method in ("softmax", "nystrom-64")]
    assert names == runs
    with pytest.raises(ValueError, match="holds no folder of sst2, qnli"):
        TABLE_2.plan(Setting(model=tiny_bert, data=tmp_path, size="paper"))


def test_the_papers_size_asks_for_a_model_and_says_what_it_lacks(tiny_bert, tmp_path):
    for task in PAPER:
        (tmp_path / task).mkdir()
    for study in (TABLE_2, TABLE_1):
        with pytest.raises(ValueError, match="--size paper fine-tunes a trained BERT-base: name its folder with --mod"):
            study.plan(Setting(size="paper", data=tmp_path))
        differs = study.plan(Setting(size="paper", data=tmp_path, model=tiny_bert)).differs
        assert differs.startswith("tiny-bert instead of BERT-base; Nyström attention without a convolution")
        assert "instead of a model that was pretrained with it" in differs
        assert ("instead of 40,000 steps of pretraining at that length" in differs) == (study is TABLE_1)


def test_the_trainings_are_in_the_precision_that_is_asked_for(tiny_bert, tmp_path):
    (tmp_path / "mrpc").mkdir()
    for precision in ("float32", "bfloat16"):
        plan = TABLE_2.plan(Setting(model=tiny_bert, data=tmp_path, precision=precision))
        measures = [part.measure for part in plan.parts if part.name.endswith("seed1")]
        assert len(measures) == len(SMALL["mrpc"].methods)
        for measure in measures:
            assert isinstance(measure, partial)
            training = next(argument for argument in measure.args if isinstance(argument, Training))
            assert training.arguments["precision"] == precision
