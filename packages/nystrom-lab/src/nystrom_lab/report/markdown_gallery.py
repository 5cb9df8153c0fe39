"""The results of studies as two Markdown pages: the claims with their figures, and the tables behind them."""

from collections.abc import Mapping, Sequence

from nystrom_lab.report.summary import OURS, Summary, Verdict, count_claims, verdict_counts
from nystrom_lab.report.table import Table, markdown_table

_ANSWERS = {True: "agrees", False: "**does not agree**", None: "*cannot tell*"}
_LIST = "```bash\nnystrom reproduce --list\n```"


def gallery_markdown(
    summaries: Sequence[Summary], missing: Mapping[str, str], takes: Mapping[str, str], *, pictures: str, tables: str
) -> str:
    """The page of claims: an index, then a section for each study.

    Args:
        summaries: What the studies found.
        missing: Why others were not run, by name.
        takes: What the paper's size of a study requires, by name.
        pictures: The folder of the figures, as the page links to it.
        tables: The page of the tables, as this one links to it.
    """
    parts = [
        "# The papers, measured again",
        "",
        f"{len(summaries)} studies of Nyströmformer, of Skyformer and of this library, run by `nystrom reproduce`. "
        f"{count_claims(summaries)} A rule on the rows decides each; the documentation of the study states it. "
        f"[The tables]({tables}) have the numbers, settings and commands. All studies by name:",
        "",
        _LIST,
        "",
        markdown_table(
            ("study", "shows", "the papers' claims", "ours"), (_line(summary) for summary in summaries), left=4
        ),
        *(_claims(summary, takes.get(summary.name, ""), pictures, tables) for summary in summaries),
    ]
    if missing:
        parts += ["## Not run", "", *(f"- `{name}`: {why}" for name, why in missing.items()), ""]
    return "\n".join(parts)


def gallery_tables_markdown(summaries: Sequence[Summary], claims: str) -> str:
    """The page of tables: for each study its numbers, setting and command.

    Args:
        summaries: What the studies found.
        claims: The page of claims, as this one links to it.
    """
    parts = [
        "# Tables of the gallery",
        "",
        f"The numbers behind [the claims]({claims}). Each study ends with its command, and with the precisions, "
        "devices, commits and dates of its rows, which are in [results](../results/README.md). All studies by name:",
        "",
        _LIST,
        "",
        *(_numbers(summary) for summary in summaries),
    ]
    return "\n".join(parts)


def tables_markdown(tables: Sequence[Table]) -> str:
    """The tables of a study."""
    return "\n".join(
        (f"{table.title}:\n\n" if table.title else "") + markdown_table(table.heads, table.lines, left=table.left)
        for table in tables
    )


def verdicts_markdown(verdicts: Sequence[Verdict]) -> str:
    """The verdicts of a study as a table, a line each; "" for none."""
    lines = ((verdict.claim, _ANSWERS[verdict.agrees], verdict.numbers) for verdict in verdicts)
    return markdown_table(("claim", "verdict", "what decides"), lines, left=3) if verdicts else ""


def _line(summary: Summary) -> tuple[str, ...]:
    counts = (verdict_counts(summary.claims(ours=ours)) or "–" for ours in (False, True))
    return f"[{summary.name}](#{summary.name})", summary.shows, *counts


def _claims(summary: Summary, takes: str, pictures: str, tables: str) -> str:
    images = "".join(f"![{summary.shows}]({pictures}/{figure})\n\n" for figure in summary.figures)
    differs = f"{_differs(summary)} " if summary.differs else ""
    needs = f"The paper's size takes {takes}. " if takes else ""
    papers, ours = (verdicts_markdown(summary.claims(ours=ours)) for ours in (False, True))
    # Below the papers' own claims, those that a reader could take for theirs.
    if ours and summary.source != OURS:
        ours = f"\nClaims of this library, which the paper does not make:\n\n{ours}"
    return (
        f"## {summary.name}\n\n{summary.shows[0].upper()}{summary.shows[1:]} ({summary.source}).\n\n"
        f"{papers}{ours}\n{images}{differs}{needs}[Tables]({tables}#{summary.name}).\n"
    )


def _differs(summary: Summary) -> str:
    return f"Differs from the paper: {summary.differs or 'in nothing'}."


def _numbers(summary: Summary) -> str:
    setting = "; ".join(f"{name}: {value}" for name, value in summary.setting.items())
    # Rows that were gathered elsewhere do not say how long they took.
    time = f" in {summary.minutes:.1f} minutes" if summary.minutes else ""
    # The tables stand under a paper's name, and must not pass as its setting.
    return (
        f"## {summary.name}\n\n{_differs(summary)}\n\n{tables_markdown(summary.tables)}\n"
        f"Setting: {setting}. {summary.rows} rows{time}. "
        f"`{summary.command}`, on {summary.provenance}.\n"
    )
