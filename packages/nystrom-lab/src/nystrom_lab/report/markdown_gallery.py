"""The results of studies in Markdown: the page of all claims, and the tables and verdicts of one study."""

from collections.abc import Mapping, Sequence

from nystrom_lab.report.summary import OURS, Summary, Verdict, count_claims
from nystrom_lab.report.table import Table, markdown_table

_ANSWERS = {True: "agrees", False: "**does not agree**", None: "*cannot tell*"}


def gallery_markdown(summaries: Sequence[Summary], missing: Mapping[str, str], *, pictures: str, results: str) -> str:
    """The page of claims: a section for each study, with its pictures, its claims and the command for its numbers.

    Args:
        summaries: What the studies found.
        missing: Why others were not run, by name.
        pictures: The folder of the figures, as the page links to it.
        results: The folder of the rows, from the root of the repository.
    """
    parts = [
        "# The papers, measured again",
        "",
        f"{len(summaries)} studies of Nyströmformer, of Skyformer and of this library, run by `nystrom reproduce`. "
        f"{count_claims(summaries)} A rule on the rows decides each. The tables of a study, and the numbers that "
        "decide its claims, are printed by",
        "",
        f"```bash\nnystrom report study {results}/{summaries[0].name}.csv --study {summaries[0].name} --verdicts\n```",
        "",
        f"Each row of `{results}` has the command, device, date and commit that it is of.",
        "",
        *(_section(summary, pictures, differs) for summary, differs in zip(summaries, _once(summaries), strict=True)),
    ]
    if missing:
        parts += ["## Not on this page", "", *(f"- `{name}`: {why}" for name, why in missing.items()), ""]
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


def claims_markdown(summary: Summary) -> str:
    """The claims of a study with their verdicts, those of this library under a paper's name marked; "" for none."""
    lines = (
        (f"{'Ours: ' if verdict.ours and summary.source != OURS else ''}{verdict.claim}", _ANSWERS[verdict.agrees])
        for verdict in sorted(summary.verdicts, key=lambda verdict: verdict.ours)
    )
    return markdown_table(("claim", "verdict"), lines, left=2) if summary.verdicts else ""


def _once(summaries: Sequence[Summary]) -> list[str]:
    """How each differs from the paper; what several share is said at the first."""
    first: dict[str, str] = {}
    return [
        each.differs
        if first.setdefault(each.differs, each.name) == each.name or len(each.differs) < len(each.name) + 50
        else f"as [{first[each.differs]}](#{first[each.differs]})"
        for each in summaries
    ]


def _section(summary: Summary, pictures: str, differs: str) -> str:
    shown = " ".join(f"[Figure]({pictures}/{figure})." for figure in summary.figures)
    source = "" if summary.source == OURS else f" ({summary.source})"
    # Claims stand under a paper's name, and must not pass as made at its setting.
    differs = "" if summary.source == OURS else f" Differs from the paper: {differs or 'in nothing'}."
    shows = f"{summary.shows[0].upper()}{summary.shows[1:]}{source}."
    return f"## {summary.name}\n\n{shows} {shown}{differs}\n\n{claims_markdown(summary)}"
