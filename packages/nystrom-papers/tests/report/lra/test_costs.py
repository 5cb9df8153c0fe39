import dataclasses

import pytest

from nystrom_lab.measure.rows import Row
from nystrom_papers.report.lra.tables import cost_lines, lra_markdown, print_lra


def rows_of(task, method, seconds, megabytes):
    known = {"study": f"train {task}", "method": method, "device": "a device"}
    return [
        Row(quantity=quantity, value=value, unit=unit, facts={"layers": 2, "preset": "demo"}, seed=seed, **known)
        for seed, (time, memory) in enumerate(zip(seconds, megabytes, strict=True))
        for quantity, value, unit in (("training time", time, "s"), ("peak memory", memory, "MB"), ("steps", 500, ""))
    ]


ROWS = [*rows_of("text", "nystrom-128", [1800, 3600], [1000, 1500]), *rows_of("listops", "sparse", [7200], [250])]


def test_cells_are_means_over_the_seeds_beside_the_printed_ones():
    lines = cost_lines(ROWS, time=True, memory=True)
    assert lines[0] == ("nystrom-128, demo", ["–", "0.75 / 1.25", "–", "–", "–"])
    # Table 2 of Skyformer: .71 hours and 1.37 GB on ListOps, .71 and 1.21 on Text.
    assert lines[1][0] == "  Skyformer T2, nystrom-128"
    assert lines[1][1][:2] == ["0.71 / 1.37", "0.71 / 1.21"]
    assert lines[2] == ("sparse, demo", ["2.00 / 0.25", "–", "–", "–", "–"])
    assert len(lines) == 3


def test_hours_and_gigabytes_are_shown_alone_too(capsys):
    assert cost_lines(ROWS, time=True, memory=False)[0][1][1] == "0.75"
    assert cost_lines(ROWS, time=False, memory=True)[0][1][1] == "1.25"
    print_lra(ROWS, time=True, memory=False)
    printed = capsys.readouterr().out
    assert "text (demo): 500 steps; nystrom-128" in printed
    assert "| **nystrom-128, demo** | – | 1.25 |" in lra_markdown(ROWS, time=False, memory=True)


def test_notes_say_whose_steps_they_are_and_the_papers_line_comes_once():
    other = [row.with_facts(preset="skyformer") for row in rows_of("text", "nystrom-128", [90_000], [4000])]
    other = [dataclasses.replace(row, value=9000) if row.quantity == "steps" else row for row in other]
    text = lra_markdown([*ROWS, *rows_of("text", "linear", [60], [9]), *other], time=True, memory=False)
    table, notes = text.split("\n\n")
    assert "- text (demo): 500 steps; nystrom-128, linear\n" in notes
    assert "- text (skyformer): 9,000 steps; nystrom-128\n" in notes
    assert all(line.startswith("- ") for line in notes.splitlines())
    names = [line.split("|")[1].strip("* ") for line in table.splitlines()[2:]]
    assert names[:3] == ["nystrom-128, demo", "nystrom-128, skyformer", "Skyformer T2, nystrom-128"]
    assert names[3:] == ["sparse, demo", "linear, demo"]


def test_rows_without_a_time_are_refused():
    with pytest.raises(ValueError, match="no training time"):
        cost_lines([row for row in ROWS if row.quantity == "steps"], time=True, memory=False)


def test_runs_that_do_not_belong_together_are_not_averaged():
    with pytest.raises(ValueError, match="two runs of sparse"):
        cost_lines([*ROWS, *rows_of("listops", "sparse", [100], [250])], time=True, memory=False)
    longer = [dataclasses.replace(row, seed=1) for row in rows_of("listops", "sparse", [7200], [250])]
    longer = [dataclasses.replace(row, value=900) if row.quantity == "steps" else row for row in longer]
    with pytest.raises(ValueError, match="differ in steps: 500, 900"):
        cost_lines([*ROWS, *longer], time=True, memory=False)
    for change, says in (({"n": 4_000}, "n: None, 4000"), ({"device": "a GPU"}, "device: a device, a GPU")):
        other = [dataclasses.replace(row, seed=1, **change) for row in rows_of("listops", "sparse", [7200], [250])]
        with pytest.raises(ValueError, match=f"differ in {says}"):
            cost_lines([*ROWS, *other], time=True, memory=False)
