"""The tables of the Long Range Arena from runs, and their rules on rows made by hand."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from nystrom_lab.measure.rows import Row, append_rows
from nystrom_lab.training.presets import DEPARTURES, DRAWN_BY_SEGMENTS
from nystrom_lab.training.run_folder import RunFolder
from nystrom_papers.report.printed import LRA_TASKS, NYSTROMFORMER_TABLE_3, SKYFORMER_TABLE_1
from nystrom_papers.studies.arena.paper_tables import STUDIES
from nystrom_papers.studies.reproduce.run import check_study, run_study
from nystrom_papers.studies.reproduce.study import Setting

NYSTROMFORMER, SKYFORMER = STUDIES["nystromformer-table-3"], STUDIES["skyformer-table-1"]


def row(task, method, value, *, seed=0, preset="demo", samples=2000):
    return Row(
        study="", quantity=f"{task} test accuracy", method=method, value=value, unit="", n=100, repeats=samples,
        facts={"layers": 2, "preset": preset}, seed=seed, device="a CPU", command="nystrom train",
    )  # fmt: skip


def rows(**tasks):
    return [row(task, method, value) for task, methods in tasks.items() for method, value in methods.items()]


def test_on_par_is_for_all_five_tasks():
    of = {"softmax": 0.6, "nystrom-32": 0.62}
    for count, agrees in ((4, None), (5, True)):
        found = NYSTROMFORMER.verdicts(rows(**dict.fromkeys(LRA_TASKS[:count], of)))[0]
        assert found.agrees is agrees
        assert f"({count} of 5 tasks)" in found.numbers


# One standard error of .4 over 2,000 samples is 1.1 points, that of a difference 1.5.
@pytest.mark.parametrize(
    ("of", "agrees"),
    [
        ({"softmax": 0.4, "nystrom-32": 0.42}, None),
        ({"softmax": 0.4, "nystrom-32": 0.4}, None),
        ({"softmax": 0.4, "nystrom-32": 0.365}, None),
        ({"softmax": 0.4, "nystrom-32": 0.345}, False),
        ({"nystrom-32": 0.4}, None),
    ],
)
def test_on_par_is_at_most_two_points_below_by_two_standard_errors(of, agrees):
    assert NYSTROMFORMER.verdicts(rows(listops=of))[0].agrees is agrees
    # Two classes tell a half, so that .4 of text has not learned, and is no task to lose.
    assert NYSTROMFORMER.verdicts(rows(text=of))[0].agrees is None
    if agrees is False:
        # One task is enough to break it.
        both = rows(listops=of, text={"softmax": 0.6, "nystrom-32": 0.7})
        assert NYSTROMFORMER.verdicts(both)[0].agrees is agrees
        guess = replace(row("listops", "softmax", 0.355), quantity="listops first operator of test")
        said = NYSTROMFORMER.verdicts([*both, guess])[0].numbers
        assert said.endswith("the first operator of an expression alone tells 35.5 % of the test samples.")


def everywhere(**methods):
    """The same accuracies on all five tasks."""
    return [row(task, name.replace("_", "-"), value) for task in LRA_TASKS for name, value in methods.items()]


@pytest.mark.parametrize(
    ("others", "agrees"),
    [
        ({"reformer_2": 0.3, "linformer_32": 0.3, "performer_32": 0.36}, True),
        ({"reformer_2": 0.3, "linformer_32": 0.3, "performer_32": 0.39}, None),
        ({"reformer_2": 0.3, "linformer_32": 0.45}, False),
        ({"reformer_2": 0.3, "linformer_32": 0.3}, None),
    ],
)
def test_above_the_others_is_by_more_than_two_standard_errors(others, agrees):
    found = NYSTROMFORMER.verdicts(everywhere(nystrom_32=0.4, **others))[1]
    assert found.agrees is agrees
    assert "+10.0 ± 0.7 beside reformer (5 of 5 tasks)" in found.numbers


@pytest.mark.parametrize(
    ("softmax", "others", "agrees"), [(0.6, 0.65, True), (0.6, 0.55, False), (0.6, 0.605, None), (0.5, 0.7, None)]
)
def test_skyformers_claims_are_on_the_average_of_five_tasks_that_softmax_learned(softmax, others, agrees):
    measured = everywhere(softmax=softmax, kernelized=others, skyformer_32=others)
    assert [verdict.agrees for verdict in SKYFORMER.verdicts(measured)] == [agrees, agrees]
    # On four of them there is no average.
    fewer = [row for row in measured if not row.quantity.startswith("image")]
    assert {verdict.agrees for verdict in SKYFORMER.verdicts(fewer)} == {None}
    said = "softmax is no better than a guess on text, retrieval, pathfinder."
    assert (said in SKYFORMER.verdicts(measured)[0].numbers) is (softmax == 0.5)


def test_an_average_takes_the_tasks_of_both():
    two = {"listops": {"softmax": 0.3, "skyformer-32": 0.4}, "text": {"softmax": 0.9, "kernelized": 0.5}}
    measured = rows(image={"skyformer-32": 0.1}, **two)
    kernelized, skyformer = SKYFORMER.verdicts(measured)
    assert "-40.0 ± 1.3 beside softmax (1 of 5 tasks)" in kernelized.numbers
    assert "+10.0 ± 1.5 beside softmax (1 of 5 tasks)" in skyformer.numbers


def test_runs_of_one_preset_are_compared_and_of_the_papers_where_there_are_any():
    measured = rows(listops={"softmax": 0.2, "kernelized": 0.4, "skyformer-32": 0.4})
    measured.append(row("listops", "softmax", 0.5, preset="modern"))
    assert "+20.0" in SKYFORMER.verdicts(measured)[1].numbers
    papers = [row("listops", method, 0.45, preset="skyformer") for method in ("softmax", "skyformer-32")]
    assert "+0.0" in SKYFORMER.verdicts([*measured, *papers])[1].numbers
    assert "kernelized: softmax was not measured" in SKYFORMER.verdicts([*measured, *papers])[0].numbers


def test_the_title_of_the_table_and_the_page_say_what_was_run():
    table, few = NYSTROMFORMER, ("softmax", "nystrom-32", "skyformer-32")
    demo = [row("listops", method, 0.35, seed=seed) for method in few for seed in range(2)]
    demo += [replace(each, quantity="listops steps", value=700.0) for each in demo]
    ran = (
        "listops with the preset demo, 700 of 5,000 steps, 100 of 2,000 positions, 2 seeds, without reformer linformer "
        "performer; not run: text retrieval image pathfinder"
    )
    assert table.differs(demo) == ran
    assert table.tables(demo)[0].title.endswith(f"; compared are {ran}")
    papers = [replace(each, n=2_000).with_facts(preset="nystromformer") for each in demo]
    papers = [replace(each, value=5_000.0) if each.quantity == "listops steps" else each for each in papers]
    said = table.differs([*demo, *papers])
    assert said.startswith("listops with the preset nystromformer, 5,000 steps, 2,000 positions, 2 seeds, without")
    assert said.endswith(DEPARTURES)
    assert SKYFORMER.differs(demo).endswith(f"; not run: text retrieval image pathfinder; {DRAWN_BY_SEGMENTS}")


def test_rows_that_do_not_say_their_preset_never_stand_for_the_papers_setting():
    old = [each.with_facts(preset=None) for each in everywhere(softmax=0.6, nystrom_32=0.5)]
    on_par, _ = NYSTROMFORMER.verdicts(old)
    assert (on_par.agrees, on_par.numbers) == (None, "not measured on one task.")
    names = [line[0] for line in NYSTROMFORMER.tables(old)[0].lines]
    assert names == ["softmax, unknown preset", "nystrom-32, unknown preset"]


def test_seeds_that_differ_widen_the_error():
    seeds = [row("listops", "kernelized", value, seed=seed) for seed, value in enumerate((0.3, 0.4, 0.5))]
    # The mean is 10 points above, its standard error 5.8.
    assert "+10.0 ± 5.9 beside softmax" in SKYFORMER.verdicts([*seeds, row("listops", "softmax", 0.3)])[0].numbers


@pytest.fixture
def runs(tmp_path):
    """Folders as `nystrom lra run` leaves them: two that are finished, and one that is not."""
    for method, finished in (("softmax", True), ("nystrom", True), ("linformer", False)):
        run = RunFolder(tmp_path / "runs" / f"listops-{method}-demo-seed0")
        run.path.mkdir(parents=True)
        (run.path / "run.json").write_text("{}")
        if finished:
            made = replace(row("listops", method, 0.35), study="train listops", quantity="test accuracy")
            append_rows(run.rows, [made, replace(made, quantity="steps", value=1000.0)])
    return tmp_path / "runs"


def test_finished_runs_become_a_table_with_what_was_printed(runs, tmp_path):
    job = check_study("nystromformer-table-3", Setting(runs=runs), tmp_path)
    assert [part.name for part in job.plan.parts] == ["listops-nystrom-demo-seed0", "listops-softmax-demo-seed0"]
    summary = run_study(job, lambda line: None)
    lines = {line[0].strip(): line[1] for line in summary.tables[0].lines}
    assert lines["nystrom, demo"].startswith("35.0 (1; 1.1)")
    assert "37.15" in [line[1] for line in summary.tables[0].lines]
    # The scores are equal, and the error of 2,000 samples is too wide.
    assert summary.verdicts[0].agrees is None
    assert (job.folder / "nystromformer-table-3.png").is_file()


def test_what_is_missing_is_named(runs, tmp_path):
    with pytest.raises(ValueError, match="reads trained runs: name the folder"):
        check_study("skyformer-table-1", Setting(), tmp_path)
    with pytest.raises(ValueError, match="holds no finished run"):
        check_study("skyformer-table-1", Setting(runs=tmp_path / "none"), tmp_path)
    with pytest.raises(ValueError, match="three finished runs with the preset skyformer of softmax on listops") as said:
        check_study("skyformer-table-1", Setting(runs=runs, size="paper"), tmp_path)
    assert f"--methods {' '.join(SKYFORMER_TABLE_1)} --seeds 0 1 2" in str(said.value)


def test_the_page_trains_every_method_of_the_tables():
    page = (Path(__file__).parents[5] / "docs" / "papers.md").read_text(encoding="utf-8")
    for preset, printed in (("nystromformer", NYSTROMFORMER_TABLE_3), ("skyformer", SKYFORMER_TABLE_1)):
        commands = re.findall(rf"nystrom lra run --preset {preset} [^`]*", page)
        assert commands
        for command in commands:
            assert f"--methods {' '.join(printed)} --seeds 0 1 2 " in command


def test_the_papers_size_says_how_its_presets_depart_from_the_papers_code(tmp_path):
    made = row("listops", "softmax", 0.35)
    sizes = {"nystrom": "-128+skip", "linformer": "-256"}
    for task, method, seed in product(LRA_TASKS, NYSTROMFORMER_TABLE_3, range(3)):
        run = RunFolder(tmp_path / f"{task}-{method}-nystromformer-seed{seed}")
        run.path.mkdir()
        (run.path / "run.json").write_text("{}")
        facts = {"preset": "nystromformer"} | ({"projections": "trained"} if method == "linformer" else {})
        name = method + sizes.get(method, "")
        result = replace(made, study=f"train {task}", quantity="test accuracy", method=name, seed=seed, facts=facts)
        append_rows(run.rows, [result, replace(result, quantity="steps", value=5_000.0)])
    plan = NYSTROMFORMER.plan(Setting(runs=tmp_path, size="paper"))
    assert "; pooling of real tokens alone, a denominator in linear attention" in plan.differs
    # A training with another projection is not the preset's.
    run = RunFolder(tmp_path / "listops-linformer-nystromformer-seed2")
    run.rows.unlink()
    old = replace(made, study="train listops", quantity="test accuracy", method="linformer-256", seed=2)
    append_rows(run.rows, [replace(old, facts={"preset": "nystromformer"})])
    with pytest.raises(ValueError, match="needs three finished runs with the preset nystromformer of linformer on lis"):
        NYSTROMFORMER.plan(Setting(runs=tmp_path, size="paper"))
