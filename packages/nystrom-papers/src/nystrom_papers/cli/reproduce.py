"""The command that reproduces the papers' results by name."""

import textwrap
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Literal

from nystrom.checks import check_at_least, check_names
from nystrom_lab.cli.arguments import arguments_of, call

if TYPE_CHECKING:
    from nystrom_papers.studies.reproduce.run import Job


def reproduce_study(words: list[str]) -> None:
    """Reproduce a table, figure or claim of the papers by name."""
    from nystrom_lab.config import NO_SLURM, Slurm, Where

    def reproduce(
        name: str | None = None,
        *,
        list: bool = False,
        all: bool = False,
        size: Literal["small", "paper"] = "small",
        model: Path | None = None,
        texts: tuple[Path, ...] = (),
        data: Path | None = None,
        runs: Path | None = None,
        precision: Literal["float32", "bfloat16"] = "bfloat16",
        threads: int = 1,
        to: Path = Path("runs/reproduce"),
        on: Where = "local",
        slurm: Slurm = NO_SLURM,
    ) -> None:
        """Run a table, a figure or a claim of the papers as a study: rows, figures, tables and a verdict.

        The same command continues an interrupted study.

        Args:
            name: Name of the study, from --list.
            list: Print the studies: what each shows, its source, what it needs, its minutes, and your runs in --to.
            all: Run every study that needs no training and can run here, and write the page of all of them, index.md.
                Studies that train are run by their names; the page shows them once they were.
            size: "small", minutes on two cores, or "paper", the paper's setting in full.
            model: Folder of an encoder in Hugging Face format. Default: all-MiniLM-L6-v2 of nystrom[real].
            texts: Text files, may be compressed. Default: the Python language reference.
            data: Folder with the data of each task in a subfolder of its name: data/text, data/mlm, data/mrpc ...
            runs: Folder of finished runs of `nystrom lra run`; skyformer-figure-2 also takes a file of their curves.
            precision: Precision in which the pretraining and fine-tuning studies train at size "small"; float32 is
                faster on processors without fast bfloat16.
            threads: CPU threads. Most matrices of the studies are small, and slower with more threads.
            to: Folder of the results, with a subfolder for each study.
            on: "local", or "slurm": one job per study, on the cluster of this machine.
            slurm: Resources of each job.
        """

    arguments = arguments_of(reproduce, words, "reproduce", positional="name")
    name, size, to = arguments.get("name"), arguments["size"], arguments["to"]
    if (name is not None) + arguments["list"] + arguments["all"] != 1:
        came = " and ".join([name] * (name is not None) + ["--list"] * arguments["list"] + ["--all"] * arguments["all"])
        raise ValueError(
            f"expected one of the name of a study, --list or --all, got {came or 'none'}: "
            "nystrom reproduce --list prints the names."
        )
    if arguments["list"]:
        print(_list(to), end="")
        return
    check_at_least("threads", arguments["threads"], 1)
    from nystrom_papers.studies.reproduce.catalogue import CATALOGUE

    if name is not None:
        check_names("study", [name], CATALOGUE)
    arguments["slurm"].check(arguments["on"])
    import torch

    torch.set_num_threads(arguments["threads"])
    from nystrom_papers.report.gallery import check_gallery, print_summary, print_verdicts, write_gallery
    from nystrom_papers.report.summary import SUMMARY
    from nystrom_papers.studies.reproduce.run import check_study, folder_of, run_study
    from nystrom_papers.studies.reproduce.study import Setting

    setting = Setting(**{each: arguments[each] for each in ("size", "model", "texts", "data", "runs", "precision")})
    if name is not None:
        job = check_study(name, setting, to)
        if failed := _in_jobs([job], arguments):
            raise ValueError(f"{name} failed, {failed[name]}.")
        print_summary(run_study(job), job.folder)
        return
    check_gallery(to / "index.md")
    missing: dict[str, str] = {}
    jobs: dict[str, Job] = {}
    for each, entry in CATALOGUE.items():
        if entry.trains and not (folder_of(to, each, size) / SUMMARY).is_file():
            minutes = "" if entry.minutes is None else f", about {entry.minutes:g} minutes"
            missing[each] = f"trains{minutes}: run it by its name"
            continue
        try:
            jobs[each] = check_study(each, setting, to)
        except ValueError as error:
            missing[each] = str(error)
            print(f"{each}: not run: {error}")
    failed = _in_jobs([*jobs.values()], arguments)
    missing |= failed
    for each in failed:
        del jobs[each]
    verdicts = []
    for job in jobs.values():
        verdicts.append(run_study(job))
        write_gallery({other: done.folder for other, done in jobs.items()}, missing, to / "index.md")
    print_verdicts(verdicts)
    print(f"Page: {to / 'index.md'}")


def _in_jobs(studies: "list[Job]", arguments: dict[str, Any]) -> dict[str, str]:
    """Run studies as cluster jobs, if requested; returns those that failed, and why."""
    if arguments["on"] == "local":
        return {}
    from nystrom_papers.studies.reproduce.jobs import measure_in_jobs

    failures = measure_in_jobs(studies, arguments["to"], arguments["slurm"], threads=arguments["threads"])
    names = {study.folder.name: study.name for study in studies}
    return {names[each.name]: f"{each.reason}, log: {each.log}" for each in failures}


def report_gathered(words: list[str]) -> None:
    """Table and plot of the rows of a study of nystrom reproduce."""
    from nystrom_lab.measure.rows import read_rows
    from nystrom_lab.report.plots.canvas import check_figure, house_style, save_figure
    from nystrom_papers.report.gallery import tables_markdown, verdicts_markdown
    from nystrom_papers.studies.reproduce.catalogue import find_study
    from nystrom_papers.studies.reproduce.run import rows_of

    def report(
        file: Path, *, study: str, table: int | None = None, verdicts: bool = False, figure: Path | None = None
    ) -> None:
        """Print the tables of a study of `nystrom reproduce` from its rows, as Markdown.

        Args:
            file: File of rows, of this study or of several.
            study: Name of the study.
            table: Number of a single table to print, from 1. Default: all.
            verdicts: Also print the claims, and whether the rows agree with them.
            figure: File for the study's first figure, .png or .svg. Default: no figure.
        """
        if figure is not None:
            check_figure(figure)
        declared = find_study(study)
        rows = rows_of(read_rows(file), study)
        tables = list(declared.tables(rows))
        if table is not None:
            check_at_least("table", table, 1)
            if table > len(tables):
                raise ValueError(f"table is {table} but {study} has {len(tables)}: choose one of these.")
            tables = tables[table - 1 : table]
        print(tables_markdown(tables), end="")
        if verdicts:
            print(f"\n{verdicts_markdown(declared.verdicts(rows))}", end="")
        if figure is not None:
            with house_style():
                save_figure(next(iter(declared.figures(rows, file.parent).values())), figure)

    call(report, words, "report study", positional="file")


def _list(to: Path) -> str:
    """The studies as text, a block each: what it shows, its source, what it needs, and the runs of it in the folder."""
    from nystrom_papers.report.summary import SUMMARY
    from nystrom_papers.studies.reproduce.catalogue import CATALOGUE

    wrap = partial(textwrap.fill, width=get_terminal_size().columns, subsequent_indent="    ")
    blocks = []
    for name, entry in CATALOGUE.items():
        done = [size for size in ("small", "paper") if (to / f"{name}-{size}" / SUMMARY).is_file()]
        minutes = "" if entry.minutes is None else f"; about {entry.minutes:g} min on one thread"
        needs = "; ".join(filter(None, (entry.needs, entry.paper_needs and f"--size paper: {entry.paper_needs}")))
        lines = [entry.source, *([f"needs {needs}"] * bool(needs)), f"{', '.join(done) or 'no run of yours'}{minutes}"]
        blocks.append(
            "\n".join(
                [
                    wrap(f"{name}: {entry.shows}"),
                    *(wrap(line, initial_indent="    ", break_on_hyphens=False) for line in lines),
                    "",
                ]
            )
        )
    return "\n".join(blocks)
