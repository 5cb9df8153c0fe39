"""The results of studies, on the terminal and in Markdown: claims, tables, figures, and what measured them.

Pages are written from the summaries and figures in the folders of the studies; nothing is measured.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from nystrom.whole_files import write_whole
from nystrom_lab.report.table import Table, markdown_table, print_table
from nystrom_papers.report.summary import OURS, Summary, Verdict, claim_counts, count_claims, read_summary

_HEAD = "# The papers, measured again\n"
_STUDIES = "studies of Nyströmformer, of Skyformer and of this library, run by `nystrom reproduce`."
_COUNTED = ("agree", "do not", "undecided")
_ANSWERS = {True: "agrees", False: "**does not agree**", None: "*cannot tell*"}


def check_gallery(path: Path) -> None:
    """Check, before the work, that the page can be written: the file is new, or is such a page.

    Raises:
        ValueError: The file is something else.
    """
    if os.path.lexists(path) and not (path.is_file() and path.read_bytes().startswith(_HEAD.encode())):
        raise ValueError(
            f"{path} already exists and is not a page of nystrom reproduce: name another folder, or remove it first."
        )


def write_gallery(folders: Mapping[str, Path], missing: Mapping[str, str], path: Path) -> None:
    """Write the page of studies: each with its claims and what decides them, its figures, its tables and its setting.

    Folders without a summary are left out; `missing` says why studies were not run, by name. Raises as `check_gallery`,
    also for a file that came since that was called.
    """
    check_gallery(path)
    summaries = {name: summary for name, folder in folders.items() if (summary := read_summary(folder)) is not None}
    counted = count_claims([*summaries.values()])
    parts = [f"{len(summaries)} {_STUDIES} {counted} A rule on the rows decides each.\n"]
    for name, summary in summaries.items():
        links = [os.path.relpath(folders[name] / figure, path.parent) for figure in summary.figures]
        setting = ", ".join(f"{what} {value}" for what, value in summary.setting.items())
        parts += [
            _heading(summary),
            verdicts_markdown(_marked(summary)),
            *(f"![{summary.shows}]({link})\n" for link in links),
            tables_markdown(summary.tables),
            f"Measured: {setting}; {summary.rows} rows in {summary.minutes:.1f} min on {summary.provenance}, by\n\n"
            f"    {summary.command}\n",
        ]
    write_whole(path, "\n".join([_HEAD, *parts, *_listed("Not run", missing)]))


def gallery_markdown(summaries: Sequence[Summary], missing: Mapping[str, str], *, pictures: str, results: str) -> str:
    """The page of claims: for each paper, a table with a line for each study, and the claims that the rows refuse.

    Args:
        missing: Why others were not run, by name.
        pictures: The folder of the figures, as the page links to it.
        results: The folder of the rows, from the root of the repository.
    """
    first = summaries[0].name
    parts = [
        f"{len(summaries)} {_STUDIES} A rule on the rows decides whether a claim agrees:\n",
        markdown_table(Table("", ("claims of", *_COUNTED), list(claim_counts(summaries)))),
        "This command prints all claims of a study, the numbers that decide them, and its tables; each row of "
        f'`{results}` names its command, device, date and commit. "Ours" is a claim of this library.\n',
        f"```bash\nnystrom report study {results}/{first}.csv --study {first} --verdicts\n```\n",
    ]
    papers: dict[str, list[tuple[Summary, str]]] = {}
    for summary, differs in zip(summaries, _once(summaries), strict=True):
        papers.setdefault(summary.source.partition(",")[0], []).append((summary, differs))
    for paper, studies in papers.items():
        words = ("study", "it shows", *(["differs from the paper"] * (paper != OURS)))
        lines = [
            (_linked(each, pictures), each.shows, differs or "in nothing", *counts(each))
            if paper != OURS
            else (_linked(each, pictures), each.shows, *counts(each))
            for each, differs in studies
        ]
        refused = [f"- {each.name}: {claim}" for each, _ in studies for claim in refused_claims(each)]
        parts += [
            f"## {paper[0].upper()}{paper[1:]}\n",
            markdown_table(Table("", (*words, *_COUNTED), lines, len(words))),
            *(["Claims that do not agree with the rows:\n", *refused, ""] if refused else []),
        ]
    return "\n".join([_HEAD, *parts, *_listed("Not on this page", missing)])


def tables_markdown(tables: Sequence[Table]) -> str:
    """The tables of a study."""
    return "\n".join(map(markdown_table, tables))


def verdicts_markdown(verdicts: Sequence[Verdict]) -> str:
    """The verdicts of a study as a table, a line each; "" for none."""
    lines = [(verdict.claim, _ANSWERS[verdict.agrees], verdict.numbers) for verdict in verdicts]
    return markdown_table(Table("", ("claim", "verdict", "what decides"), lines, 3)) if verdicts else ""


def counts(summary: Summary) -> tuple[str, ...]:
    """How many claims of a study agree with the rows, do not, and are undecided; empty for a study without claims."""
    answers = [verdict.agrees for verdict in summary.verdicts]
    return tuple(str(answers.count(answer)) if answers else "" for answer in (True, False, None))


def refused_claims(summary: Summary) -> list[str]:
    """The claims of a study that do not agree with the rows, those of this library marked."""
    return [verdict.claim for verdict in _marked(summary) if verdict.agrees is False]


def _marked(summary: Summary) -> list[Verdict]:
    """The verdicts, those on this library's claims last and, under a paper's name, marked."""
    return [
        each._replace(claim=f"{'Ours: ' if each.ours and summary.source != OURS else ''}{each.claim}")
        for each in sorted(summary.verdicts, key=lambda verdict: verdict.ours)
    ]


def _once(summaries: Sequence[Summary]) -> list[str]:
    """How each differs from the paper; the first of several states what they share."""
    first: dict[str, str] = {}
    return [
        each.differs
        if first.setdefault(each.differs, each.name) == each.name or len(each.differs) < len(each.name) + 50
        else f"as {first[each.differs]}"
        for each in summaries
    ]


def _linked(summary: Summary, pictures: str) -> str:
    """The name of a study, a link to its first figure, and its other figures by number."""
    words = [summary.name, *map(str, range(2, len(summary.figures) + 1))]
    links = [f"[{word}]({pictures}/{figure})" for word, figure in zip(words, summary.figures, strict=False)]
    return ", ".join(links) or summary.name


def _heading(summary: Summary) -> str:
    # Claims stand under a paper's name, and must not pass as made at its setting.
    source, differs = f" ({summary.source})", f" Differs: {summary.differs or 'in nothing'}."
    if summary.source == OURS:
        source = differs = ""
    return f"## {summary.name}\n\n{summary.shows[0].upper()}{summary.shows[1:]}{source}.{differs}\n"


def _listed(title: str, missing: Mapping[str, str]) -> list[str]:
    """The studies that are left out, and why."""
    return [f"## {title}\n", *(f"- `{name}`: {why}" for name, why in missing.items()), ""] if missing else []


def print_summary(summary: Summary, folder: Path) -> None:
    """Print the tables and verdicts of a study, and where its files are."""
    for table in summary.tables:
        print_table(table)
        print()
    lines = [f"Differs from the paper: {summary.differs}"] if summary.differs else []
    for whose, ours in (("", False), ("Of this library: ", True)):
        lines += [f"{whose}{v.claim} {v.word.capitalize()}: {v.numbers}" for v in summary.claims(ours=ours)]
    for line in lines:
        print(line)
    print(f"Rows: {folder / 'rows.csv'}")
    for figure in summary.figures:
        print(f"Figure: {folder / figure}, and the same as .svg")


def print_verdicts(summaries: Sequence[Summary]) -> None:
    """Print every claim of some studies with its verdict, one per line, and the counts of the verdicts."""
    lines = [
        (summary.name, "ours" if ours else "paper", verdict.claim, verdict.word)
        for summary in summaries
        for ours in (False, True)
        for verdict in summary.claims(ours=ours)
    ]
    print_table(Table("", ("study", "of", "claim", "verdict"), lines, 4))
    print(count_claims(summaries) or "No claims.")
