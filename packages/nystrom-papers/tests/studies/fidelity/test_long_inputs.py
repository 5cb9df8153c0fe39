"""The study of long inputs: its rules, and two lengths of it on a small model."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from nystrom_lab.measure.rows import Row, read_rows
from nystrom_papers.studies.fidelity import long_inputs
from nystrom_papers.studies.fidelity.long_inputs import ERROR, HIDDEN, MEMORY, METHODS, PACKAGE, RATIO, STUDIES, TIME
from nystrom_papers.studies.reproduce.run import check_study, run_study

NAME = "long-inputs"
STUDY = STUDIES[NAME]


@pytest.mark.long
def test_a_length_beyond_the_positions(tiny_setting, prose, tmp_path, monkeypatch):
    small = {"LENGTHS": (16, 1200, 5000, 6000), "ROUNDS": 1, "SHORT_ROUNDS": {"small": 1}, "SHORT_LENGTHS": (8,)}
    for name, value in (small | {"MIXED_LENGTHS": ((3, 8), (8, 300))}).items():
        monkeypatch.setattr(long_inputs, name, value)
    (tmp_path / "long.txt").write_text(prose.read_text() * 8)
    run_study(check_study(NAME, replace(tiny_setting, texts=(tmp_path / "long.txt",)), tmp_path), lambda line: None)
    folder = tmp_path / f"{NAME}-small"
    rows = read_rows(folder / "rows.csv")
    found = {(row.quantity, row.method, row.n): row.value for row in rows if row.quantity in (ERROR, HIDDEN)}
    for quantity in (ERROR, HIDDEN):
        assert found[quantity, "softmax", 1200] == 0
        # Exact up to 1,024 tokens, except for the order of sums in float32.
        assert found[quantity, "near_far", 16] < 1e-6
        assert 1e-3 < found[quantity, "near_far", 1200] < found[quantity, "nystrom-64", 1200]
    assert {(row.fact("of"), row.n) for row in rows if row.quantity == MEMORY} == {
        (place, n) for place in ("attention", "encoder") for n in (16, 1200)
    }
    table, short, positions, passes, attention = STUDY.tables(rows)
    assert [line[:3] for line in passes.lines] == [
        [of, lengths, time]
        for of, lengths in (("short inputs", "8"), ("mixed lengths", "3 8"), ("mixed lengths", "8 300"))
        for time in ("forward time", "training time")
    ]
    assert [line[0] for line in positions.lines] == ["1200"]
    assert "nan" not in positions.lines[0]
    # Exact attention has no line beside itself.
    approximate = list(METHODS)[1:]
    assert [line[0] for line in short.lines] == approximate
    assert [line[0] for line in attention.lines] == [*approximate, PACKAGE]
    assert all(re.fullmatch(r"\d\.\d\d / \d+\.\d\d", cell) for line in short.lines for cell in line[1:])
    in_table = (*METHODS, long_inputs.PACKAGE)
    assert [line[:2] for line in table.lines] == [[n, name] for n in ("16", "1200") for name in in_table]
    # The package is not put into the encoder. The package computes Nyström attention, with other zeros in front.
    assert all(all(line) == (line[1] != long_inputs.PACKAGE) for line in table.lines)
    package, ours = (found[ERROR, name, 1200] for name in (long_inputs.PACKAGE, "nystrom-256"))
    assert package == pytest.approx(ours, rel=0.3)
    assert (folder / f"{NAME}.png").is_file()
    # The longer model is made once, and once with repeated positions.
    assert len(list(folder.glob("*-1200*"))) == 2
    # Stretched positions are what the first rows have, too.
    stretched = next(row for row in rows if row.facts.get("positions") == "interpolate" and row.method == "near_far")
    assert stretched.value == found[stretched.quantity, "near_far", 1200]


def row(quantity, value, n, method="near_far", of="attention", positions=None, part=0.0):
    """A row whose quartiles are a part of its value away."""
    facts = {"of": of} if quantity in (TIME, RATIO, MEMORY) else {}
    if positions is not None:
        facts["positions"] = positions
    return Row(study="", quantity=quantity, method=method, value=value, unit="", n=n, facts=facts, device="a CPU",
                   repeats=16, low=value * (1 - part), high=value * (1 + part))  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ([], ["agrees"] * 3),
        ([row(ERROR, 0.14, 4096)], ["does not agree", "agrees", "agrees"]),
        ([row(ERROR, 0.15, 8192)], ["agrees"] * 3),
        ([row(ERROR, 0.17, 8192)], ["does not agree", "agrees", "agrees"]),
        ([row(HIDDEN, 0.22, 2048)], ["agrees", "does not agree", "agrees"]),
        # The limits are within the errors.
        ([row(ERROR, 0.125, 4096, part=0.1)], ["cannot tell", "agrees", "agrees"]),
        ([row(HIDDEN, 0.195, 2048)], ["agrees", "cannot tell", "agrees"]),
        ([row(RATIO, 0.97, 4096, part=0.05)], ["agrees", "agrees", "cannot tell"]),
        ([row(RATIO, 1.06, 1024)], ["agrees", "agrees", "does not agree"]),
        ([row(RATIO, 1.01, 2048)], ["agrees", "agrees", "does not agree"]),
        # Another method's rows, and those of the encoder, decide nothing.
        ([row(ERROR, 9, 512, method="nystrom-64"), row(RATIO, 9, 4096, of="encoder")], ["agrees"] * 3),
    ],
)
def test_each_claim_is_decided_by_its_rule(changed, words):
    rows = [row(ERROR, 0.1, 2048), row(HIDDEN, 0.18, 2048), row(RATIO, 1.04, 512), row(RATIO, 0.7, 2048)]
    assert [verdict.word for verdict in STUDY.verdicts([*rows, *changed])][:3] == words


@pytest.mark.parametrize(
    ("repeated", "word"), [({2048: 0.2}, "agrees"), ({2048: 0.09}, "does not agree"), ({4096: 0.2}, "cannot tell")]
)
@pytest.mark.parametrize("quantity", [ERROR, HIDDEN])
def test_positions_are_compared_at_one_length(quantity, repeated, word):
    rows = [row(quantity, 0.11, 2048, positions="interpolate")]
    rows += [row(quantity, value, n, positions="repeat") for n, value in repeated.items()]
    assert STUDY.verdicts(rows)[3].word == word


@pytest.mark.parametrize(
    ("of", "beside", "spread", "word"),
    [
        ("short inputs", "exact", (1.0, 1.02, 1.05), "agrees"),
        ("short inputs", "exact", (1.0, 1.02, 1.06), "cannot tell"),
        ("short inputs", "exact", (1.06, 1.07, 1.08), "does not agree"),
        ("mixed lengths", "near_far, exact_up_to=0", (0.7, 1.08, 1.1), "agrees"),
        ("mixed lengths", "near_far, exact_up_to=0", (1.11, 1.12, 1.2), "does not agree"),
    ],
)
def test_a_ratio_of_short_sequences_is_decided_with_its_quartiles(of, beside, spread, word):
    low, value, high = spread
    ratio = replace(row(f"training time / {beside}", value, 512), low=low, high=high)
    assert STUDY.verdicts([ratio.with_facts(of=of, lengths="512")])[4].word == word


def test_positions_that_differ_within_the_errors_cannot_tell():
    for quantity, part in ((ERROR, 0.2), (HIDDEN, 0.0)):
        rows = [row(quantity, value, 2048, positions=how, part=part)
                for how, value in (("interpolate", 0.11), ("repeat", 0.118))]  # fmt: skip
        assert STUDY.verdicts(rows)[3].word == "cannot tell"


def test_the_figure_names_each_line_at_its_end_with_its_error_there():
    of = [(n, method) for n in (512, 8192) for method in (*METHODS, PACKAGE)]
    rows = [row(TIME, 10.0 * n * (method == "softmax") + n, n, method) for n, method in of]
    rows += [row(ERROR, 0.0 if method == "softmax" else n / 1e5, n, method) for n, method in of]
    [figure] = STUDY.figures(rows, Path()).values()
    said = {text.get_text() for text in figure.axes[0].texts}
    named = {f"{name}\nerror 0.08" for name in ("nystrom-attention", "near_far", "nystrom-64")}
    assert said == {"exact attention\nerror 0.00", *named}
    [figure] = STUDY.figures([each for each in rows if each.method != PACKAGE], Path()).values()
    assert len(figure.axes[0].texts) == 3
    assert {len(line.get_xdata()) for line in figure.axes[0].get_lines()} == {2}
