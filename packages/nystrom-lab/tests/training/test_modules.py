"""A training enters few modules, and those of no other task."""

import json
import subprocess
import sys

SCRIPT = """
import json, sys
from nystrom_lab.cli.main import main
code = main(sys.argv[1:])
assert code == 0, code
print(json.dumps([name for name in sys.modules if name.partition(".")[0] == "nystrom_lab"]))
"""
# A ceiling, which what is added must not raise; it was 115, 65, 48, 40. The last two part two files that imported each
# other, and hold the order of steps that all kinds of runs share.
MOST = 42


def test_a_training_enters_few_modules_and_none_of_another_task(data, tmp_path):
    words = ["train", "listops", "--preset", "demo", "--steps", "2", "--batch-size", "8", "--device", "cpu"]
    words += ["--data", str(data), "--to", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    entered = json.loads(done.stdout.splitlines()[-1])
    assert len(entered) <= MOST, sorted(entered)
    assert not [name for name in entered if name.startswith(("nystrom_lab.data.lra.texts", "nystrom_lab.data.sources"))]
