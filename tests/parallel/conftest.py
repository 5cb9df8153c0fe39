"""Starts the ranks of a group; a start takes seconds, so that one runs many checks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def run_on_ranks(tmp_path):
    """Run the checks of a file on some ranks; gives what failed, by rank and name."""

    def run(checks: str, size: int) -> dict[str, str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "error::UserWarning:nystrom", str(HERE / "ranks.py")]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(size), str(tmp_path), str(HERE / f"{checks}.py")],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            said = [rank.communicate(timeout=400)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        for rank, process in enumerate(ranks):
            assert process.returncode == 0, said[rank]
        failed = {}
        for rank in range(size):
            found = json.loads((tmp_path / f"failed-{rank}.json").read_text())
            failed |= {f"{name} on rank {rank}": error for name, error in found.items()}
        return failed

    return run
