"""The library and its tests do without the laboratory, in imports and in names that are imported by name."""

from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_nothing_of_the_library_names_the_laboratory():
    files = [*ROOT.glob("packages/nystrom/**/*.py"), ROOT / "conftest.py"]
    assert len(files) > 200
    name = "nystrom" + "_lab"
    assert [file for file in files if name in file.read_text(encoding="utf-8")] == []
