"""Instances that are cut over processes."""

import pytest

from nystrom_lab.config import PretrainOptions
from nystrom_lab.training.pretrain.pretrain import pretrain


@pytest.mark.slow
@pytest.mark.parametrize("shared", [1, 2], ids=["a share of the instances each", "a piece of every instance each"])
def test_two_processes_give_the_run_of_one(shared, short_run, torchrun, same_run, documents, tmp_path):
    # Whole documents, 30 to 90 tokens long: shares and pieces differ in how many words are masked.
    one = short_run(tmp_path / "one", dropout=0.0, length=96)
    settings = {"preset": "demo", "length": 96, "steps": 8, "warmup-steps": 2, "batch-size": 8, "evaluate-every": 2}
    settings |= {"log-every": 1, "instances": 40, "device": "cpu", "options.num-landmarks": 8, "conv-kernel-size": 3}
    settings |= {"num-hidden-layers": 1, "hidden-size": 32, "num-attention-heads": 2, "intermediate-size": 64}
    settings |= {"dropout": 0.0, "data": documents, "to": tmp_path / "two", "context-parallel": shared, "threads": 1}
    done = torchrun(2, "pretrain", *(word for name, value in settings.items() for word in (f"--{name}", value)))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("held out: MLM accuracy") == 1
    same_run(tmp_path / "two", one, step=8)


def test_a_method_that_is_not_cut_is_refused_before_a_run_begins(documents, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="model attends by informer, which does not work over ranks: use one of"):
        pretrain(
            PretrainOptions(
                data=documents, to=tmp_path / "run", preset="demo", length=24, attention="informer", context_parallel=2
            )
        )
    assert not (tmp_path / "run").exists()
