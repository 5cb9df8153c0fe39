"""Run a study: check it, continue where it was interrupted, write rows part by part, plot, and report the results.

A study has a folder of its own, TO/NAME-SIZE:

- setting.json: what is measured, so that rows of another setting are never mixed in;
- rows.csv: the rows of `nystrom_lab.measure.rows`, appended part by part; the column `part` names the part;
- seconds.json: how long each part took; and arrays for the figures, if any;
- NAME.png and NAME.svg, and summary.json: the tables, verdicts and provenance, drawn from the rows at the end.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from nystrom.json_files import parse_json, read_json
from nystrom.progress import Progress
from nystrom.whole_files import check_folder, write_whole
from nystrom_lab.measure.rows import Row, append_rows, other_setting, read_rows, started_as
from nystrom_lab.report.plots.canvas import house_style, save_figure
from nystrom_lab.training.run_folder import alone
from nystrom_papers.report.summary import Summary, provenance_of, write_summary
from nystrom_papers.studies.reproduce.catalogue import find_study
from nystrom_papers.studies.reproduce.study import Plan, Setting, Study

SETTING, ROWS, SECONDS = "setting.json", "rows.csv", "seconds.json"


class Job(NamedTuple):
    """A study that is checked and ready to run."""

    name: str
    study: Study
    plan: Plan
    setting: Setting
    folder: Path


def check_study(name: str, setting: Setting, to: Path) -> Job:
    """Plan a study, and check what can be checked before any work.

    Raises:
        ValueError: The name is unknown, the study cannot run in this setting, or its folder cannot be written or holds
            rows of another setting.
    """
    study = find_study(name)
    plan = study.plan(setting)
    names = [part.name for part in plan.parts]
    assert len(set(names)) == len(names), names
    assert not any(" " in part for part in names), names
    folder = folder_of(to, name, setting.size)
    check_folder(folder)
    check_setting(folder, plan.setting)
    return Job(name, study, plan, setting, folder)


def folder_of(to: Path, name: str, size: str) -> Path:
    """The folder of a study."""
    return to / f"{name}-{size}"


def run_study(job: Job, say: Callable[[str], None] = print) -> Summary:
    """Measure the parts that have no rows yet, draw the figures, and write and return the summary.

    Raises:
        ValueError: Another command is working in the folder, or a file there is damaged.
    """
    with alone(job.folder, "`nystrom reproduce`"):
        _measure(job, say)
        return draw_study(job)


def _measure(job: Job, say: Callable[[str], None]) -> None:
    """Measure the parts that have no rows yet."""
    name, file, parts = job.name, job.folder / ROWS, job.plan.parts
    done, _ = _measured(job), _seconds(job.folder)
    check_setting(job.folder, job.plan.setting)
    _write(job.folder / SETTING, job.plan.setting)
    if done:
        say(f"{name}: continuing, {len(done)} of {len(parts)} parts have their rows.")
    # Rows of a training have that of their own start.
    model = {"fingerprint": job.plan.setting.get("fingerprint")}
    progress = Progress(name, len(parts), unit="parts", initial=sum(part.name in done for part in parts))
    for place, part in enumerate(parts, start=1):
        if part.name in done:
            continue
        began = time.monotonic()
        try:
            with progress.doing(part.name):
                rows = list(part.measure(job.folder))
        except KeyboardInterrupt:
            say(f"\nStopped in part {place} of {len(parts)} of {name}; the same command continues.")
            raise
        seconds = time.monotonic() - began
        append_rows(file, [replace(row, study=name, facts={**model, **row.facts, "part": part.name}) for row in rows])
        _write(job.folder / SECONDS, _seconds(job.folder) | {part.name: round(seconds, 3)})
        say(f"{name}: part {place} of {len(parts)}, {part.name}, {seconds:.1f} s")


def is_measured(job: Job) -> bool:
    """Whether all parts of a study have their rows."""
    return _measured(job) >= {part.name for part in job.plan.parts}


def _measured(job: Job) -> set[str]:
    """The parts that have their rows."""
    file = job.folder / ROWS
    rows = read_rows(file) if file.exists() else []
    for row in rows:
        if row.study != job.name:
            raise other_setting(file, "study", row.study, job.name)
    return {row.facts["part"] for row in rows}


def draw_study(job: Job) -> Summary:
    """Plot the existing rows, and write and return the summary.

    Raises:
        ValueError: There are no rows.
    """
    study, rows = job.study, read_rows(job.folder / ROWS)
    if not rows:
        raise ValueError(f"{job.folder / ROWS} holds no rows: run the study first.")
    plain = [row.with_facts(part=None) for row in rows]
    figures = []
    with house_style():
        for which, figure in study.figures(plain, job.folder).items():
            figures.append(f"{job.name}{'-' if which else ''}{which}.png")
            for suffix in (".png", ".svg"):
                save_figure(figure, (job.folder / figures[-1]).with_suffix(suffix))
    commands = list(dict.fromkeys(row.command for row in rows))
    # Each training has its own command, and may be older than this call.
    trained = sum(row.value for row in rows if row.quantity == "training time")
    summary = Summary(
        name=job.name,
        shows=study.shows,
        source=study.source,
        size=job.setting.size,
        setting=dict(job.plan.setting),
        differs=job.plan.differs if study.differs is None else study.differs(plain),
        tables=list(study.tables(plain)),
        verdicts=list(study.verdicts(plain)),
        figures=figures,
        rows=len(rows),
        provenance=provenance_of(rows),
        command=started_as() if study.trains else ", then ".join(commands),
        minutes=max(trained, sum(_seconds(job.folder).values())) / 60,
    )
    write_summary(summary, job.folder)
    return summary


def check_setting(folder: Path, wanted: Mapping[str, str]) -> None:
    """Raise ValueError if a folder holds rows of a setting other than the wanted one, or files that are no study.

    Files beside rows or a setting belong to the study: arrays and runs may be there before the first rows.
    """
    file = folder / SETTING
    if not (folder / ROWS).exists():
        others = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
        if others and not _is_setting(file):
            raise ValueError(f"{folder} holds {sorted(others)[0]} and no study: choose another folder with --to.")
        return
    if not file.exists():
        return
    try:
        came = parse_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"{file} is damaged (it {error}), so the origin of the rows next to it is unknown: choose another --to."
        ) from error
    # Version 0.3 recorded no fingerprint of a model.
    came = {"fingerprint": wanted.get("fingerprint"), **came}
    for name in dict.fromkeys([*wanted, *came]):
        if came.get(name) != wanted.get(name):
            raise ValueError(
                f"{folder} holds rows with {name} = {came.get(name)!r}, but {wanted.get(name)!r} was "
                "requested: choose another folder with --to."
            )


def _is_setting(file: Path) -> bool:
    with suppress(OSError, ValueError):
        return all(isinstance(value, str) for value in parse_json(file.read_bytes()).values())
    return False


def rows_of(rows: Sequence[Row], name: str) -> list[Row]:
    """The rows of one study among those of several, in the form that its tables and verdicts expect.

    Raises:
        ValueError: There are no rows of it.
    """
    of_study = [row.with_facts(part=None) for row in rows if row.study == name]
    if not of_study:
        studies = ", ".join(dict.fromkeys(row.study for row in rows))
        raise ValueError(f"the rows hold no study {name!r}; expected one of {studies or 'none, the file is empty'}.")
    return of_study


def _seconds(folder: Path) -> dict[str, float]:
    file = folder / SECONDS
    return read_json(file, remedy="delete it; it says how long the parts took") if file.is_file() else {}


def _write(file: Path, content: Mapping[str, object]) -> None:
    write_whole(file, json.dumps(dict(content), indent=1) + "\n")
