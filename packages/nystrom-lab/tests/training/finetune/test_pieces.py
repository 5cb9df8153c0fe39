"""Texts that are cut over processes."""

import json
import shutil

import pytest

from nystrom.command_options import ConvertOptions
from nystrom.integrations.convert import convert


@pytest.fixture(scope="session", params=["ours", "bert"])
def encoder(request, bert, tmp_path_factory):
    """The tiny BERT without dropout, as a model of this library or as it is, and the method that it is given."""
    folder = tmp_path_factory.mktemp("encoders") / request.param
    if request.param == "ours":
        convert(ConvertOptions(bert, folder, num_landmarks=4))
    else:
        shutil.copytree(bert, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_dropout_prob": 0.0}))
    return folder, None if request.param == "ours" else "nystrom"


@pytest.mark.slow
def test_two_processes_that_share_each_text_give_the_run_of_one(tuned, encoder, films, torchrun, same_run, tmp_path):
    model, attention = encoder
    options = None if attention is None else {"num_landmarks": 4}
    one = tuned(tmp_path / "one", model=str(model), attention=attention, options=options)
    settings = {"model": model, "data": films, "to": tmp_path / "two", "steps": 6, "batch-size": 8, "evaluate-every": 3}
    settings |= {"learning-rate": 1e-3, "device": "cpu", "context-parallel": 2, "threads": 1}
    settings |= {} if attention is None else {"attention": attention, "num-landmarks": 4}
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    done = torchrun(2, "finetune", "sst2", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    same_run(tmp_path / "two", one, step=6)
    read = [(run / "predictions" / "SST-2.tsv").read_text() for run in (tmp_path / "two", one)]
    assert read[0] == read[1]


def test_what_cannot_be_cut_is_refused_before_a_run_begins(tuned, encoder, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = {"model": str(encoder[0]), "context_parallel": 2, "attention": "bigbird", "options": {}}
    with pytest.raises(ValueError, match="model attends by bigbird, which does not work over ranks: use one of"):
        tuned(tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()
