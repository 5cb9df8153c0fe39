"""Take what `nystrom reproduce --all` measured into this repository: rows into results/, the page into docs/.

    python tools/gather_gallery.py runs/reproduce

The rows of all studies become one file, results/reproduce-small_DEVICE_DATE.csv, in place of the one before, and those
of the studies that train another, results/reproduce-trained-small_DEVICE_DATE.csv; their figures go to docs/gallery/,
and docs/gallery.md is written. Rows of a checkout with changes raise an error, and so do rows of several commits where
nothing is trained: numbers that are printed together must be measured together. Trainings take days.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from nystrom.measure.rows import append_rows, read_rows
from nystrom.report.markdown_gallery import gallery_markdown
from nystrom.report.summary import read_summary
from nystrom.studies.reproduce.catalogue import CATALOGUE

ROOT = Path(__file__).resolve().parents[1]


def gather(runs: Path, results: Path, docs: Path) -> Path:
    """Copy rows and figures, write the page, and return the file of rows.

    Raises:
        ValueError: No studies, or rows that were not measured at one clean commit.
    """
    folders = {name: runs / f"{name}-small" for name in CATALOGUE}
    summaries = {name: found for name, folder in folders.items() if (found := read_summary(folder)) is not None}
    file = _take_rows("reproduce-small", [folders[name] for name in summaries if not CATALOGUE[name].trains], results)
    trained = [folders[name] for name in summaries if CATALOGUE[name].trains]
    if trained:
        _take_rows("reproduce-trained-small", trained, results, several=True)
    pictures = docs / "gallery"
    shutil.rmtree(pictures, ignore_errors=True)
    pictures.mkdir(parents=True)
    for name, summary in summaries.items():
        for figure in summary.figures:
            _copy_small(folders[name] / figure, pictures / figure)
    missing = {
        name: "not written yet" if entry.home is None else f"not among these rows; needs {entry.needs or 'nothing'}"
        for name, entry in CATALOGUE.items()
        if name not in summaries
    }
    (docs / "gallery.md").write_text(gallery_markdown(list(summaries.values()), missing, "gallery"), encoding="utf-8")
    return file


def _take_rows(name: str, folders: Sequence[Path], results: Path, *, several: bool = False) -> Path:
    """Write the rows of studies into one file, in place of the one before."""
    rows = [row for folder in folders for row in read_rows(folder / "rows.csv")]
    commits = sorted({row.commit for row in rows})
    dirty = any(not commit or commit.endswith("+dirty") for commit in commits)
    if dirty or not commits or (len(commits) > 1 and not several):
        raise ValueError(
            f"{folders[0].parent} holds rows of the commits {commits}; expected those of one, without changes."
        )
    device = re.sub(r"[^a-z0-9]+", "-", rows[0].device.lower().replace("(r)", "")).strip("-")
    file = results / f"{name}_{device.replace('-processor', '')}_{max(row.date for row in rows)}.csv"
    for old in results.glob(f"{name}_*.csv"):
        old.unlink()
    append_rows(file, rows)
    return file


def _copy_small(figure: Path, to: Path) -> None:
    """Write a picture in 256 colours of its own: a third of the size, and the same to the eye."""
    with Image.open(figure) as picture:
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(to, optimize=True)


def main() -> None:
    """Gather, and say where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    asked = parser.parse_args()
    try:
        print(f"{gather(asked.runs, ROOT / 'results', ROOT / 'docs')}\n{ROOT / 'docs' / 'gallery.md'}")
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
