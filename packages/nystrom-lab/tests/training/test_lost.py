"""A process that dies or hangs: what the others say, and how the run goes on."""

import pytest

pytestmark = pytest.mark.slow

# The second process fails in step 8, where it does so for the first time.
FAILING = """
import os, signal, sys, time
from nystrom_lab.cli.main import main
from nystrom_lab.training.arena import EncoderTrainer
inner = EncoderTrainer.training_step
def training_step(self, *given):
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and self.state.global_step == 7:
        {how}
    return inner(self, *given)
EncoderTrainer.training_step = training_step
sys.exit(main())
"""


@pytest.fixture
def launch(tmp_path, data, demo_words, torchrun):
    def run(how, *words, launcher=()):
        script = tmp_path / "failing.py"
        script.write_text(FAILING.format(how=how))
        to = ["--context-parallel", 2, "--data", data, "--to", tmp_path / "run"]
        return torchrun(2, "train", "listops", *demo_words, *to, *words, launcher=launcher, script=script)

    return run


def test_a_killed_process_is_started_again_and_the_run_goes_on(launch, small_run, same_run, tmp_path):
    done = launch("os.kill(os.getpid(), signal.SIGKILL)", launcher=["--max-restarts", "1"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Continuing after step 6." in done.stdout
    same_run(tmp_path / "run", small_run(tmp_path / "one", dropout=0.0))


@pytest.mark.parametrize(
    ("how", "step"),
    [
        ("time.sleep(600)", 8),
        # One process sleeps while the others write the checkpoint of step 9.
        ("EncoderTrainer._save_checkpoint = lambda *given: time.sleep(600)", 10),
    ],
)
def test_a_process_that_hangs_is_named_and_the_run_can_be_resumed(how, step, launch, small_run, same_run, tmp_path):
    done = launch(how, "--timeout", "40")
    assert done.returncode != 0
    [line] = [line for line in done.stderr.splitlines() if "nystrom: " in line]
    assert line.startswith(f"nystrom: rank 0 of 2 lost rank 1 in step {step} (")
    assert line.endswith("): continue with --resume, from step 6.")
    done = launch("pass", "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    same_run(tmp_path / "run", small_run(tmp_path / "one", dropout=0.0))
