"""The results of studies, on the terminal and as one page: every figure, table, setting and verdict.

The page is one HTML file with its pictures inside, written from the summaries and figures in the folders of the
studies; nothing is measured.
"""

import base64
import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from nystrom.whole_files import write_whole
from nystrom_lab.report.summary import Summary, Verdict, count_claims, read_summary, verdict_counts
from nystrom_lab.report.table import Table, print_table

_HEAD = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    "<title>nystrom: the papers, measured again</title>"
)
_STYLE = """
:root { --ink: #1b1f24; --faint: #5b6570; --line: #d8dde3; --tint: #f5f7f9; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: #ffffff; font: 15px/1.55 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1.2rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; }
h2 { font-size: 1.25rem; margin: 0; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p { margin: .4rem 0; }
.faint { color: var(--faint); }
code { font-size: .86em; overflow-wrap: anywhere; }
section { border-top: 1px solid var(--line); padding: 1.6rem 0 .4rem; margin-top: 1.6rem; }
img { max-width: 100%; height: auto; display: block; margin: .8rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
th, td { padding: .22rem .7rem .22rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th.word, td.word { text-align: left; }
th { color: var(--faint); font-weight: 600; }
.verdict { background: var(--tint); border-left: 4px solid var(--line); padding: .45rem .8rem; margin: .45rem 0; }
.agrees { border-color: #009E73; }
.differs { border-color: #D55E00; }
.unknown { border-color: #999999; }
.decided { font-weight: 600; }
dl { margin: .6rem 0; font-size: .88rem; }
dt { float: left; clear: left; color: var(--faint); width: 7.5rem; }
dd { margin: 0 0 .1rem 7.5rem; overflow-wrap: anywhere; }
"""


def check_gallery(path: Path) -> None:
    """Check, before the work, that the page can be written: the file is new, or is such a page.

    Raises:
        ValueError: The file is something else.
    """
    if os.path.lexists(path) and not (path.is_file() and _HEAD.encode() in path.read_bytes()):
        raise ValueError(
            f"{path} already exists and is not a page of nystrom reproduce: name another folder, or remove it first."
        )


def write_gallery(folders: Mapping[str, Path], missing: Mapping[str, str], path: Path) -> None:
    """Write the page of studies.

    Args:
        folders: Folders of studies, by name; those without a summary are left out.
        missing: Why studies were not run, by name.
        path: The file.

    Raises:
        ValueError: As `check_gallery`, also for a file that came since that was called.
    """
    check_gallery(path)
    found = {name: summary for name, folder in folders.items() if (summary := read_summary(folder)) is not None}
    body = [
        "<h1>The papers, measured again</h1>",
        f"<p>{len(found)} studies of Nyströmformer, of Skyformer and of this library, run by <code>nystrom "
        f"reproduce</code>. {count_claims([*found.values()])} Rules decide, on the rows; they are in the documentation "
        "of each study.</p>",
        _contents(found),
        *(_section(summary, folders[name]) for name, summary in found.items()),
    ]
    if missing:
        items = "".join(f"<li><b>{_text(name)}</b>: {_text(why)}</li>" for name, why in missing.items())
        body.append(f"<section><h2>Not run</h2><ul>{items}</ul></section>")
    page = f"{_HEAD}<style>{_STYLE}</style></head>\n<body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"
    write_whole(path, page)


def print_summary(summary: Summary, folder: Path) -> None:
    """Print the tables and verdicts of a study, and where its files are."""
    from rich.console import Console

    console = Console()
    for table in summary.tables:
        print_table(table, console)
        console.print()
    if summary.differs:
        console.print(f"Differs from the paper: {summary.differs}", markup=False, highlight=False, soft_wrap=True)
    for whose, ours in (("", False), ("Of this library: ", True)):
        for verdict in summary.claims(ours=ours):
            line = f"{whose}{verdict.claim} {verdict.word.capitalize()}: {verdict.numbers}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    print(f"Rows: {folder / 'rows.csv'}")
    for figure in summary.figures:
        print(f"Figure: {folder / figure}, and the same as .svg")


def print_verdicts(summaries: Sequence[Summary]) -> None:
    """Print every claim of some studies with its verdict, one per line, and the counts of the verdicts."""
    from rich.console import Console

    lines = [
        (summary.name, "ours" if ours else "paper", verdict.claim, verdict.word)
        for summary in summaries
        for ours in (False, True)
        for verdict in summary.claims(ours=ours)
    ]
    print_table(Table("", ("study", "of", "claim", "verdict"), lines, 4), Console())
    print(count_claims(summaries) or "No claims.")


def _contents(found: Mapping[str, Summary]) -> str:
    lines = [
        (
            f'<a href="#{_text(name)}">{_text(name)}</a>',
            _text(summary.shows),
            *(_text(verdict_counts(summary.claims(ours=ours))) or "–" for ours in (False, True)),
        )
        for name, summary in found.items()
    ]
    rows = "".join(f"<tr>{''.join(f'<td class=word>{cell}</td>' for cell in line)}</tr>" for line in lines)
    heads = "".join(f"<th class=word>{head}</th>" for head in ("study", "shows", "the paper's claims", "ours"))
    return f"<div class=wide><table><tr>{heads}</tr>{rows}</table></div>"


def _section(summary: Summary, folder: Path) -> str:
    parts = [
        f'<section id="{_text(summary.name)}"><h2>{_text(summary.name)}</h2>',
        f"<p>{_text(summary.shows[0].upper() + summary.shows[1:])}. "
        f"<span class=faint>{_text(summary.source)}.</span></p>",
        *(_verdict(verdict, "") for verdict in summary.claims(ours=False)),
        *(_verdict(verdict, "Of this library: ") for verdict in summary.claims(ours=True)),
        *(_picture(folder / figure, summary.shows) for figure in summary.figures),
        *(_table(table) for table in summary.tables),
        _facts(summary),
        "</section>",
    ]
    return "\n".join(parts)


def _verdict(verdict: Verdict, whose: str) -> str:
    kind = {True: "agrees", False: "differs", None: "unknown"}[verdict.agrees]
    return (
        f'<div class="verdict {kind}">{whose}{_text(verdict.claim)} <span class=decided>'
        f"{_text(verdict.word.capitalize())}</span>: {_text(verdict.numbers)}</div>"
    )


def _picture(path: Path, shows: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{_text(shows)}" src="data:image/png;base64,{data}">'


def _table(table: Table) -> str:
    def row(cells: object, tag: str) -> str:
        words = ' class="word"'
        return "".join(
            f"<{tag}{words if place < table.left else ''}>{_text(cell)}</{tag}>"
            for place, cell in enumerate(cells)  # type: ignore[arg-type]
        )

    lines = "".join(f"<tr>{row(line, 'td')}</tr>" for line in table.lines)
    title = f"<h3>{_text(table.title)}</h3>" if table.title else ""
    return f"{title}<div class=wide><table><tr>{row(table.heads, 'th')}</tr>{lines}</table></div>"


def _facts(summary: Summary) -> str:
    facts = {
        "differs": summary.differs or "in nothing: the paper's setting",
        **summary.setting,
        "measured": f"{summary.rows} rows in {summary.minutes:.1f} min on {summary.provenance}",
        "command": summary.command,
    }
    items = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts.items())
    return f"<dl>{items}</dl>"


def _text(value: str) -> str:
    return html.escape(value)
