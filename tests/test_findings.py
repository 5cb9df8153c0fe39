"""The index of the findings: a line for each script, of the versions that it installs."""

import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "findings"


def test_the_index_has_each_script_with_its_package_and_version():
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[[\w-]+\]\(([\w-]+\.sh)\) \| ([\w-]+) ([\d.]+) \|", index, flags=re.MULTILINE)
    assert [script for script, *_ in rows] == sorted(path.name for path in FOLDER.glob("*.sh"))
    for script, package, version in rows:
        text = (FOLDER / script).read_text(encoding="utf-8")
        assert f'"{package}=={version}"' in text, script
        assert text.splitlines()[1].startswith("# "), script
        assert "Exit status: 0 while the behaviour holds" in text, script
