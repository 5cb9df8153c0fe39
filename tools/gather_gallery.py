"""Take what `nystrom reproduce` measured into this repository: rows into results/, the page into docs/.

    python tools/gather_gallery.py runs/reproduce
    python tools/gather_gallery.py --restore runs/reproduce
    python tools/gather_gallery.py --restate NAME... [--draw]

The rows of a study become the file results/gallery/NAME.csv, in place of older ones. Figures and summaries go to
docs/gallery/, and docs/gallery.md is written from all summaries there, those of earlier days too. Rows of a checkout
with changes raise an error, and so do rows of several commits of one study where nothing is trained: numbers that are
printed together must be measured together. Trainings take days.

With --restore the rows in results/ become folders of studies again, each without the figures, where there is none yet:
`nystrom reproduce NAME --to runs/reproduce` then goes on with the parts that have no rows.

With --restate the tables and verdicts of these studies are made again from the rows in results/, as after a rule has
changed, and with --draw the figures, where rows are all that they need; nothing is measured.
"""

import argparse
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from PIL import Image

from nystrom.temporary import scratch_folder
from nystrom_lab.measure.rows import Row, append_rows, read_rows
from nystrom_lab.report.plots.canvas import house_style, save_figure
from nystrom_papers.report.gallery import gallery_markdown
from nystrom_papers.report.summary import Summary, provenance_of, read_summary, write_summary
from nystrom_papers.studies.reproduce.catalogue import CATALOGUE, find_study
from nystrom_papers.studies.reproduce.run import rows_of

ROOT = Path(__file__).resolve().parents[1]


def gather(runs: Path, results: Path, docs: Path) -> list[Path]:
    """Copy rows and figures, write the page, and return the files of rows.

    Raises:
        ValueError: No studies, or rows of a study that were not measured at one clean commit.
    """
    folders = {name: runs / f"{name}-small" for name in CATALOGUE}
    found = {name: summary for name, folder in folders.items() if (summary := read_summary(folder)) is not None}
    if not found:
        raise ValueError(
            f"{runs} holds no study that was run; expected some of {', '.join(map(str, folders.values()))}."
        )
    rows = {name: read_rows(folders[name] / "rows.csv") for name in found}
    for name, of in rows.items():
        _check_commits(folders[name], of, several=CATALOGUE[name].trains)
    files = []
    for name, of in rows.items():
        files.append(results / "gallery" / f"{name}.csv")
        files[-1].unlink(missing_ok=True)
        append_rows(files[-1], of)
    pictures = docs / "gallery"
    pictures.mkdir(parents=True, exist_ok=True)
    for name, summary in found.items():
        before = read_summary(pictures, f"{name}.json")
        for figure in () if before is None else before.figures:
            (pictures / figure).unlink(missing_ok=True)
        write_summary(summary, pictures, f"{name}.json")
        for figure in summary.figures:
            _copy_small(folders[name] / figure, pictures / figure)
    write_provenance(results, docs)
    write_page(docs)
    return files


def restore(runs: Path, results: Path) -> list[Path]:
    """Write the gathered rows of each study into its folder, and return the folders that were made."""
    made = []
    for name, rows in _gathered(results).items():
        folder = runs / f"{name}-small"
        if not folder.exists():
            folder.mkdir(parents=True)
            append_rows(folder / "rows.csv", rows)
            made.append(folder)
    return made


def write_provenance(results: Path, docs: Path) -> None:
    """Write what the rows in RESULTS are of, and how many, into the summaries in DOCS/gallery."""
    for name, rows in _gathered(results).items():
        if (kept := read_summary(docs / "gallery", f"{name}.json")) is not None:
            changed = replace(kept, rows=len(rows), provenance=provenance_of(rows))
            write_summary(changed, docs / "gallery", f"{name}.json")


def restate(names: Collection[str], results: Path, docs: Path, *, draw: bool) -> None:
    """Write tables, verdicts and, with `draw`, figures of some studies again, from the rows in RESULTS, and the page.

    Raises:
        ValueError: A study has no rows or no summary, or a figure is of more than rows.
    """
    gathered, pictures = _gathered(results), docs / "gallery"
    for name in names:
        kept = read_summary(pictures, f"{name}.json")
        if kept is None or name not in gathered:
            raise ValueError(f"{results} or {pictures} has nothing of {name}; expected one of {', '.join(gathered)}.")
        study, rows = find_study(name), rows_of(gathered[name], name)
        if draw:
            kept = replace(kept, figures=_draw_again(name, rows, kept, pictures))
        changed = replace(
            kept,
            shows=CATALOGUE[name].shows,
            source=CATALOGUE[name].source,
            differs=kept.differs if study.differs is None else study.differs(rows),
            tables=list(study.tables(rows)),
            verdicts=list(study.verdicts(rows)),
        )
        write_summary(changed, pictures, f"{name}.json")
    write_provenance(results, docs)
    write_page(docs)


def _draw_again(name: str, rows: list[Row], kept: Summary, pictures: Path) -> list[str]:
    """Draw the figures of a study in place of those that there are, and return their names."""
    with scratch_folder() as folder, house_style():
        figures = find_study(name).figures(rows, folder)
        drawn = [f"{name}{'-' if which else ''}{which}.png" for which in figures]
        for old in kept.figures:
            (pictures / old).unlink(missing_ok=True)
        for file, figure in zip(drawn, figures.values(), strict=True):
            save_figure(figure, folder / file)
            _copy_small(folder / file, pictures / file)
    return drawn


def write_page(docs: Path) -> None:
    """Write the page of claims from the summaries in DOCS/gallery."""
    kept = {name: read_summary(docs / "gallery", f"{name}.json") for name in CATALOGUE}
    summaries: dict[str, Summary] = {name: summary for name, summary in kept.items() if summary is not None}
    missing = {
        name: f"its rows are results/{name}.csv"
        if (ROOT / "results" / f"{name}.csv").is_file()
        else f"not among these rows; needs {entry.needs or 'nothing'}"
        for name, entry in CATALOGUE.items()
        if name not in summaries
    }
    page = gallery_markdown(list(summaries.values()), missing, pictures="gallery", results="results/gallery")
    (docs / "gallery.md").write_text(page, encoding="utf-8")


def _gathered(results: Path) -> dict[str, list[Row]]:
    """The rows in RESULTS by study."""
    return {file.stem: read_rows(file) for file in sorted((results / "gallery").glob("*.csv"))}


def _check_commits(folder: Path, rows: list[Row], *, several: bool) -> None:
    commits = sorted({row.commit for row in rows})
    dirty = any(not commit or commit.endswith("+dirty") for commit in commits)
    if dirty or not commits or (len(commits) > 1 and not several):
        raise ValueError(f"{folder} holds rows of the commits {commits}; expected those of one, without changes.")


def _copy_small(figure: Path, to: Path) -> None:
    """Write a picture in 256 colours of its own: a third of the size, and the same to the eye."""
    with Image.open(figure) as picture:
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(to, optimize=True)


def main() -> None:
    """Gather, and say where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", help="folder of `nystrom reproduce`")
    parser.add_argument("--restore", action="store_true", help="make folders of studies from the rows in results/")
    parser.add_argument("--restate", nargs="+", metavar="NAME", help="write these studies again from their rows")
    parser.add_argument("--draw", action="store_true", help="with --restate: the figures, too")
    asked = parser.parse_args()
    if (asked.runs is None) is (asked.restate is None):
        parser.error("name the folder of the studies, or with --restate the studies")
    if asked.restate is not None:
        restate(asked.restate, ROOT / "results", ROOT / "docs", draw=asked.draw)
        return
    if asked.restore:
        print("\n".join(map(str, restore(asked.runs, ROOT / "results"))) or "nothing to restore")
        return
    try:
        for file in (*gather(asked.runs, ROOT / "results", ROOT / "docs"), ROOT / "docs" / "gallery.md"):
            print(file)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
