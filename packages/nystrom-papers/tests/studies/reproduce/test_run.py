"""The frame of all studies, held by a small one that counts how often it measures."""

import dataclasses

import pytest
from matplotlib.figure import Figure

from nystrom_lab.measure.rows import Row, read_rows
from nystrom_lab.report.table import Table
from nystrom_lab.training.run_folder import alone
from nystrom_papers.report.summary import Verdict, read_summary
from nystrom_papers.studies.reproduce.catalogue import find_study
from nystrom_papers.studies.reproduce.run import Job, check_setting, draw_study, folder_of, run_study
from nystrom_papers.studies.reproduce.study import Part, Plan, Setting, Study

NAME = "complexity"


class Squares:
    """A study of four squares, which may be interrupted at one of them."""

    def __init__(self):
        self.measured, self.interrupt_at = [], None

    def measure(self, number):
        if number == self.interrupt_at:
            raise KeyboardInterrupt
        self.measured.append(number)
        row = Row(study="", quantity="square", method="product", value=number**2, unit="", device="none", n=number)
        return [dataclasses.replace(row, facts={"b": 1})]

    def plan(self, setting):
        parts = [Part(f"n={i}", lambda folder, i=i: self.measure(i)) for i in range(4)]
        return Plan(parts, {"texts": str(setting.texts)}, "four numbers only")

    def study(self):
        return Study(
            shows="four squares",
            source="a paper",
            plan=self.plan,
            tables=lambda rows: [Table("", ["n", "square"], [[str(row.n), f"{row.value:g}"] for row in rows])],
            verdicts=lambda rows: [Verdict("Squares grow.", rows[-1].value > rows[0].value, f"to {rows[-1].value:g}")],
            figures=lambda rows, folder: {"": Figure(), "again": Figure()},
        )


@pytest.fixture
def squares():
    return Squares()


def job_of(squares, to, **setting):
    setting = Setting(**setting)
    folder = folder_of(to, NAME, setting.size)
    folder.mkdir(parents=True, exist_ok=True)
    return Job(NAME, squares.study(), squares.plan(setting), setting, folder)


def test_an_interrupted_study_goes_on_and_ends_like_one_that_was_not(squares, tmp_path):
    said = []
    squares.interrupt_at = 2
    with pytest.raises(KeyboardInterrupt):
        run_study(job_of(squares, tmp_path / "a"), said.append)
    assert said[-1] == f"\nStopped in part 3 of 4 of {NAME}; the same command continues."
    assert [row.n for row in read_rows(tmp_path / "a" / f"{NAME}-small" / "rows.csv")] == [0, 1]
    squares.interrupt_at = None
    done = run_study(job_of(squares, tmp_path / "a"), said.append)
    assert squares.measured == [0, 1, 2, 3]
    whole = run_study(job_of(Squares(), tmp_path / "b"), said.append)
    assert done.tables == whole.tables
    assert done.verdicts == whole.verdicts == [Verdict("Squares grow.", True, "to 9")]
    assert "continuing, 2 of 4" in " ".join(said)


def test_a_study_that_is_done_is_drawn_again_and_not_measured(squares, tmp_path):
    first = run_study(job_of(squares, tmp_path), lambda line: None)
    again = run_study(job_of(squares, tmp_path), lambda line: None)
    assert squares.measured == [0, 1, 2, 3]
    assert first == again == draw_study(job_of(squares, tmp_path))


def test_the_folder_holds_rows_figures_and_the_summary(squares, tmp_path):
    job = job_of(squares, tmp_path)
    summary = run_study(job, lambda line: None)
    for name in (f"{NAME}.png", f"{NAME}.svg", f"{NAME}-again.png", f"{NAME}-again.svg"):
        assert (job.folder / name).stat().st_size > 0
    rows = read_rows(job.folder / "rows.csv")
    assert [row.words for row in rows] == [f"b=1 part=n={i}" for i in range(4)]
    assert {row.study for row in rows} == {NAME}
    assert read_summary(job.folder) == summary
    assert summary.figures == [f"{NAME}.png", f"{NAME}-again.png"]
    assert summary.source == "a paper"


def test_a_damaged_summary_is_named(squares, tmp_path):
    job = job_of(squares, tmp_path)
    run_study(job, lambda line: None)
    (job.folder / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"summary\.json"):
        read_summary(job.folder)


def test_two_commands_in_one_folder_raise(squares, tmp_path):
    job = job_of(squares, tmp_path)
    with (
        alone(job.folder, "nystrom reproduce"),
        pytest.raises(ValueError, match="in use by another `nystrom reproduce`"),
    ):
        run_study(job, lambda line: None)
    assert squares.measured == []


def test_a_damaged_file_of_seconds_is_named_before_anything_is_measured(squares, tmp_path):
    job = job_of(squares, tmp_path)
    (job.folder / "seconds.json").write_text('{"n=0": 0.')
    with pytest.raises(ValueError, match=r"seconds\.json is not valid JSON .*: delete it"):
        run_study(job, lambda line: None)
    assert squares.measured == []
    (job.folder / "seconds.json").unlink()
    run_study(job, lambda line: None)
    assert not [path for path in job.folder.iterdir() if path.suffix == ".partial"]


def test_rows_of_another_setting_are_not_mixed_in(squares, tmp_path):
    job = job_of(squares, tmp_path)
    run_study(job, lambda line: None)
    check_setting(job.folder, job.plan.setting)
    for other in ({"texts": "another"}, {}, dict(job.plan.setting) | {"model": "bert"}):
        with pytest.raises(ValueError, match="choose another folder with --to"):
            check_setting(job.folder, other)
    (job.folder / "setting.json").write_text("[1")
    with pytest.raises(ValueError, match=r"setting\.json is damaged"):
        check_setting(job.folder, job.plan.setting)


def test_rows_say_which_model_was_studied(squares, tmp_path):
    job = job_of(squares, tmp_path)
    setting = {"model": "bert", "fingerprint": "0-1"}
    measure = job.plan.parts[0].measure
    # A training has a model of its own.
    trained = Part("trained", lambda folder: [row.with_facts(fingerprint="2-3") for row in measure(folder)])
    job = job._replace(plan=job.plan._replace(parts=[job.plan.parts[0], trained], setting=setting))
    run_study(job, lambda line: None)
    assert [row.fact("fingerprint") for row in read_rows(job.folder / "rows.csv")] == ["0-1", "2-3"]
    with pytest.raises(ValueError, match="fingerprint = '0-1', but '4-1' was requested"):
        check_setting(job.folder, setting | {"fingerprint": "4-1"})
    # Version 0.3 recorded the name alone.
    (job.folder / "setting.json").write_text('{"model": "bert"}')
    check_setting(job.folder, setting)


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(ValueError, match="Perhaps you meant 'skyformer-theorem-2'"):
        find_study("skyformer-theorem")
