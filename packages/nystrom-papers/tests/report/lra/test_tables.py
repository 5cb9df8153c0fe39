"""Accuracies over seeds with the papers' ones; only runs that belong together are averaged."""

import math
import statistics
from dataclasses import replace

import pytest

from nystrom_lab.measure.rows import Row
from nystrom_papers.report.lra.runs import Line, lra_cells
from nystrom_papers.report.lra.tables import lra_lines, lra_markdown, print_lra
from nystrom_papers.report.printed import LRA_TASKS, NYSTROMFORMER_TABLE_3, SKYFORMER_TABLE_1


def rows_of(task, method, shares, preset="skyformer", steps=50_000, samples=2_000, first_seed=0, n=None, **changes):
    return [
        Row(
            study=f"train {task}", quantity=quantity, method=method, value=value, unit="", device="a device",
            repeats=repeats, n=n, facts={"layers": 2, "preset": preset, **changes}, seed=seed,
            command=f"nystrom train {task} --attention {method} --seed {seed} --to runs/{seed}",
        )
        for seed, share in enumerate(shares, first_seed)
        for quantity, value, repeats in (("test accuracy", share, samples), ("steps", steps, 1))
    ]  # fmt: skip


def test_a_cell_holds_mean_deviation_seeds_and_standard_error():
    shares = [0.37, 0.39, 0.41]
    cell = lra_cells(rows_of("listops", "nystrom-128+skip", shares))[Line("nystrom-128+skip", "skyformer")]["listops"]
    assert cell.mean == pytest.approx(39.0)
    assert cell.deviation == pytest.approx(100 * statistics.stdev(shares))
    assert (cell.seeds, cell.samples, cell.steps) == (3, 2_000, 50_000)
    # sqrt(p (1 - p) / N) at p = .39, N = 2000.
    assert cell.error == pytest.approx(100 * math.sqrt(0.39 * 0.61 / 2_000))
    assert cell.error == pytest.approx(1.1, abs=0.05)


def test_lines_are_shown_with_both_papers_and_missing_cells_are_dashes():
    rows = [*rows_of("text", "nystrom-128", [0.65]), *rows_of("listops", "skyformer-128", [0.37, 0.39])]
    lines = dict(lra_lines(rows))
    assert lines["nystrom-128, skyformer"] == ["–", "65.0 (1; 1.1)", "–", "–", "–", "–"]
    assert lines["skyformer-128, skyformer"] == ["38.0 ± 1.4 (2; 1.1)", "–", "–", "–", "–", "–"]
    papers = ["  Nyströmformer T3", "  Skyformer T1"]
    names = ["nystrom-128, skyformer", *papers, "skyformer-128, skyformer", papers[1]]
    assert [name for name, _ in lra_lines(rows)] == names
    assert lra_lines(rows)[1][1] == ["37.15", "65.52", "79.56", "41.58", "70.94", "58.95"]


def test_runs_of_a_few_steps_name_them_and_do_not_stand_over_the_papers():
    few = rows_of("listops", "nystrom-32", [0.17], steps=20)
    assert lra_lines(few) == [("nystrom-32, skyformer", ["17.0 (1; 0.8), 20 steps", *["–"] * 5])]
    both = lra_lines([*few, *rows_of("listops", "nystrom-64", [0.37])])
    assert [name for name, _ in both[2:]] == ["  Nyströmformer T3", "  Skyformer T1"]
    assert both[1][1][0] == "37.0 (1; 1.1)"


def test_what_the_first_operator_tells_is_said_below():
    rows = rows_of("listops", "nystrom-32", [0.36, 0.37], preset="demo")
    guess = "- listops: the first operator of an expression alone tells 35.1 % of the test samples."
    told = [replace(row, quantity="first operator of test", value=0.3512) for row in rows]
    assert lra_markdown([*rows, *told]).count(guess) == 1
    assert "first operator" not in lra_markdown(rows)


@pytest.mark.parametrize(
    ("preset", "changes", "change", "says"),
    [
        ("nystromformer", {}, "options.frozen=True", "Nyströmformer's code trains it"),
        ("demo", {"design": "authors"}, "design=authors, options.frozen=True", "Nyströmformer's code trains it"),
        ("skyformer-1000", {}, "share_projections=True", "Skyformer's code has one in each"),
    ],
)
def test_trainings_of_linformer_that_do_not_say_their_projections_are_marked(preset, changes, change, says):
    old, new = (
        rows_of("text", "linformer-32", [share], preset, **changes, **facts)
        for share, facts in ((0.6, {}), (0.7, {"projections": "trained"}))
    )
    now = ", ".join([preset, *(f"{name}={value}" for name, value in changes.items())])
    # The same seed, and no mean of both.
    assert dict(lra_lines([*old, *new]))[f"linformer-32, {preset}, {change}"][1] == "60.0 (1; 1.1)"
    assert dict(lra_lines([*old, *new]))[f"linformer-32, {now}"][1] == "70.0 (1; 1.0)"
    note = f"- linformer-32 ({preset}, {change}): measured when"
    text = lra_markdown([*old, *new])
    assert text.count(note) == 1
    assert text.count(says) == 1
    assert "measured when" not in lra_markdown(new)
    other = rows_of("text", "linformer-32", [0.6], preset, design="official")
    assert "measured when" not in lra_markdown(other)
    assert "measured when" not in lra_markdown(rows_of("text", "nystrom-32", [0.6], preset, **changes))


def test_the_mean_needs_all_five_tasks():
    rows = [row for i, task in enumerate(LRA_TASKS) for row in rows_of(task, "linear", [0.1 * (i + 1)])]
    assert lra_lines(rows) == [
        ("linear, skyformer", [*(f"{10 * (i + 1)}.0 (1; {error})" for i, error in enumerate(ERRORS)), "30.0"])
    ]
    assert lra_lines(rows[:-2])[0][1][-1] == "–"


# 100 sqrt(p (1 - p) / 2000) for p of .1 to .5.
ERRORS = ("0.7", "0.9", "1.0", "1.1", "1.1")


NYSTROMFORMERS = {"softmax": 58.77, "reformer": 55.04, "linformer": 55.59, "performer": 53.63, "nystrom": 58.95}
SKYFORMERS = {"softmax": 57.37, "kernelized": 58.56, "nystrom": 58.93, "linformer": 54.69, "informer": 53.73}
SKYFORMERS |= {"performer": 58.00, "reformer": 58.99, "bigbird": 59.05, "skyformer": 59.39}


@pytest.mark.parametrize(("table", "means"), [(NYSTROMFORMER_TABLE_3, NYSTROMFORMERS), (SKYFORMER_TABLE_1, SKYFORMERS)])
def test_the_papers_numbers_have_the_means_that_they_print(table, means):
    assert table.keys() == means.keys()
    for method, numbers in table.items():
        # Printed to two places; the papers' own rounding moves the last.
        assert statistics.fmean(numbers) == pytest.approx(means[method], abs=0.0151), method


def test_sizes_of_a_method_and_changed_settings_are_lines_of_their_own():
    changed = rows_of("listops", "nystrom-64", [0.5], preset="demo", learning_rate=0.01)
    rows = [*rows_of("listops", "nystrom-32", [0.3]), *rows_of("listops", "nystrom-64", [0.4]), *changed]
    names = ["nystrom-32, skyformer", "nystrom-64, skyformer", "nystrom-64, demo, learning_rate=0.01"]
    assert [name for name, _ in lra_lines(rows)] == [*names, "  Nyströmformer T3", "  Skyformer T1"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (rows_of("listops", "softmax", [0.5]), r"two runs of softmax \(skyformer\) on listops with seed 0.*0\.3.*0\.5"),
        (rows_of("listops", "softmax", [0.5], steps=9, first_seed=1), "differ in steps: 50000, 9"),
        (rows_of("listops", "softmax", [0.5], samples=9, first_seed=1), "differ in test samples: 2000, 9"),
        (rows_of("listops", "softmax", [0.5], n=4096, first_seed=1), "differ in positions: None, 4096"),
        (rows_of("listops", "softmax", [0.3], n=4096), r"two runs of softmax \(skyformer\) on listops with seed 0"),
        (rows_of("mnist", "softmax", [0.5]), "rows are of mnist; expected tasks among listops"),
    ],
)
def test_rows_that_do_not_belong_together_raise(more, says):
    with pytest.raises(ValueError, match=says):
        lra_lines([*rows_of("listops", "softmax", [0.3]), *more])


def test_rows_without_an_accuracy_raise():
    with pytest.raises(ValueError, match="rows hold no accuracy on a test split"):
        lra_lines([])


def test_the_notes_say_steps_samples_and_commands(capsys):
    rows = [*rows_of("listops", "softmax", [0.37, 0.39]), *rows_of("listops", "nystrom-128", [0.4, 0.41])]
    text = lra_markdown(rows)
    assert "- listops (skyformer): 50,000 steps, 2,000 test samples; softmax, nystrom-128." in text
    assert "    nystrom train listops --attention softmax --seed SEED\n" in text
    assert text.count("nystrom train listops") == 2
    larger = lra_markdown(rows_of("pathfinder", "softmax", [0.5], n=4096))
    assert "- pathfinder (skyformer): 50,000 steps, 2,000 test samples, 4,096 positions; softmax." in larger
    header, rule, *body = text.split("\n\n")[0].splitlines()
    assert {line.count("|") for line in (header, rule, *body)} == {8}
    print_lra(rows)
    printed = capsys.readouterr().out
    assert "softmax, skyformer" in printed
    assert "37.10" in printed


@pytest.mark.parametrize("to", ["--to 'runs/my runs/{}'", "--to=runs/{}", "--to runs/{}"])
def test_the_command_of_all_seeds_is_one_whole_command(to):
    rows = [
        replace(row, command=f"nystrom train text --seed {row.seed} {to.format(row.seed)} --data 'my data'")
        for row in rows_of("text", "softmax", [0.5, 0.6])
    ]
    _, _, command = lra_markdown(rows).rpartition("Measured by\n\n")
    assert command == "    nystrom train text --seed SEED --data 'my data'\n"


def test_a_narrow_terminal_cuts_no_number(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    print_lra(rows_of("listops", "nystrom-64+skip", [0.166], preset="nystromformer design=transformers"))
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines()) <= 80
    assert "…" not in printed
    for number in ("16.6", "37.15", "65.52", "79.56", "41.58", "70.94", "58.95"):
        assert number in printed


def test_rows_that_say_neither_preset_nor_steps_do_not_stand_over_the_papers():
    rows = rows_of("listops", "softmax", [0.37])
    unknown = [row.with_facts(preset=None) for row in rows]
    assert lra_lines(unknown) == [("softmax, unknown preset", ["37.0 (1; 1.1)", *["–"] * 5])]
    no_steps = [row for row in rows if row.quantity != "steps"]
    assert lra_lines(no_steps) == [("softmax, skyformer", ["37.0 (1; 1.1), unknown steps", *["–"] * 5])]
