"""The command line of a fine-tuning: options of the method and of the search stand by themselves."""

from pathlib import Path

import pytest

from nystrom_lab.cli.main import main
from nystrom_lab.config import SearchGrid


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """The training that the command line asks for, without training."""
    given = {}
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "a.csv", "m"):
        Path(name).mkdir()
    note = "nystrom_lab.training.finetune.finetune.finetune"
    monkeypatch.setattr(note, lambda options: given.update(vars(options)))
    return given


def test_options_of_the_method_and_of_the_search_reach_the_run(trained):
    words = "finetune mrpc --data a b --model m --attention skyformer --num-landmarks 16 --search.batch-size 8 16"
    assert main([*words.split(), "--search.learning-rate", "2e-5"]) == 0
    assert (trained["task"], trained["data"], trained["attention"]) == ("mrpc", (Path("a"), Path("b")), "skyformer")
    assert trained["options"] == {"num_landmarks": 16}
    assert trained["grid"] == SearchGrid(batch_size=(8, 16), learning_rate=(2e-5,))
    assert not trained.get("search")


def test_own_texts_need_no_task_and_the_search_of_the_paper_no_values(trained):
    assert main(["finetune", "--data", "a.csv", "--model", "m", "--search", "--labels", "numbers"]) == 0
    assert (trained["task"], trained["search"], trained["grid"].values(), trained["options"]) == (None, True, {}, {})


def test_options_of_another_method_end_in_one_line(trained, capsys):
    assert (
        main(["finetune", "sst2", "--data", "a", "--model", "m", "--attention", "linear", "--num-landmarks", "4"]) == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert "num-landmarks" in line
    assert not trained
