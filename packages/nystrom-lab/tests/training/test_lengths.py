"""For larger pictures the model has a position for each pixel; other data that are too long still raise."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from nystrom.models import EncoderForSequenceClassification
from nystrom_lab.config import EvaluateOptions
from nystrom_lab.data.lra.pathfinder import task as lra_pathfinder
from nystrom_lab.data.lra.pathfinder.task import Pathfinder, prepare_pathfinder
from nystrom_lab.data.store.prepared_folder import new_folder
from nystrom_lab.data.store.split import Pictures, write_pictures
from nystrom_lab.measure.rows import read_rows
from nystrom_lab.training.grid.run_grid import GridOptions, run_grid
from nystrom_lab.training.presets import PRESETS, find_preset
from nystrom_lab.training.run_settings import Settings, data_positions, lengthened, train_options
from nystrom_lab.training.scoring import evaluate

SHORT = {"steps": 2, "warmup_steps": 0, "evaluate_every": 1, "batch_size": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder of data sets whose Pathfinder has pictures of 64 x 64."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        # No more than are kept.
        patch.setattr(lra_pathfinder, "chunk_size", lambda _: 40)
        sizes = {"train": 32, "val": 3, "test": 5}
        prepare_pathfinder(folder / "pathfinder-demo", size=64, **sizes, workers=1)
    return folder


def noise(to: Path, side: int) -> Path:
    """Pictures of any size, made quickly."""
    with new_folder(to, task="pathfinder", settings={}) as partial:
        for split in ("train", "val", "test"):
            pictures = Pictures(np.full((2, side, side), 7, dtype=np.uint8), np.array([0, 1], dtype=np.uint8))
            write_pictures(partial, split, [pictures], count=2, side=side)
    return to


@pytest.mark.long
def test_a_model_of_larger_pictures_has_a_position_for_each_pixel(root, small_run, tmp_path, interrupted):
    pictures = root / "pathfinder-demo"
    assert Pathfinder(pictures, "train").picture(0).shape == (64, 64)
    run = small_run(tmp_path / "run", task="pathfinder", data=pictures, **SHORT)
    model = EncoderForSequenceClassification.from_pretrained(run / "best")
    assert model.config.max_position_embeddings == 4096
    # The first two rows of the table belong to no token.
    assert model.nystromformer.embeddings.position_embeddings.weight.shape == (4098, 64)
    tested = {row.quantity: row for row in read_rows(run / "rows.csv")}["test accuracy"]
    assert (tested.n, tested.repeats) == (4096, 5)
    assert (
        evaluate(EvaluateOptions("pathfinder", model=run / "best", data=pictures, device="cpu")).value == tested.value
    )
    interrupted(2, small_run, tmp_path / "cut", task="pathfinder", data=pictures, **SHORT)
    # The run records its data, and so its positions.
    cut = small_run(tmp_path / "cut", task="pathfinder", data=None, resume=True, **SHORT)
    best = [load_file(each / "checkpoint-2" / "model.safetensors") for each in (cut, run)]
    assert_close(best[0], best[1], rtol=0, atol=0)


@pytest.mark.slow
def test_a_grid_takes_larger_pictures_from_their_folder(root, tmp_path):
    grid = {"tasks": ["pathfinder"], "methods": ["linformer"], "seeds": [0], "preset": "demo", "changes": {"steps": 1}}
    assert run_grid(GridOptions(to=tmp_path, data=root, device="cpu", threads=1, **grid)) == []
    rows = {row.quantity: row for row in read_rows(tmp_path / "lra.csv")}
    assert rows["test accuracy"].n == 4096
    settings = json.loads((tmp_path / "pathfinder-linformer-demo-seed0" / "run.json").read_text())["settings"]
    assert (settings["positions"], settings["options"]["max_length"]) == (4096, 4096)


@pytest.mark.parametrize(("side", "positions"), [(32, None), (64, 4_096), (128, 16_384), (256, 65_536)])
def test_positions_are_the_pixels_of_a_picture(tmp_path, side, positions):
    folder = noise(tmp_path / "pictures", side)
    assert data_positions(find_preset("pathfinder", "skyformer"), folder) == positions


def test_the_other_tasks_have_the_positions_of_their_preset(data, tmp_path):
    for task, name in PRESETS:
        assert data_positions(find_preset(task, name), data if task == "listops" else tmp_path / "none") is None


@pytest.mark.parametrize("preset", ["nystromformer", "skyformer", "demo"])
@pytest.mark.parametrize("positions", [4_096, 16_384, 65_536])
def test_the_longest_sequence_of_a_method_follows_the_data(preset, positions):
    settings = _settled("linformer", preset, positions)
    assert settings.options["max_length"] == positions
    assert settings.encoder_config().max_position_embeddings == settings.longest == positions
    # Nothing else does.
    assert "max_length" not in _settled("nystrom", preset, positions).options
    plain = _settled("linformer", preset, None)
    assert {**plain.options, "max_length": positions} == settings.options


@pytest.mark.parametrize(("preset", "positions"), [("official", None), ("official", 4_096), ("skyformer", 4_096)])
def test_the_token_of_the_class_is_one_more(preset, positions):
    settings = _settled("linformer", preset, positions, pooling="cls")
    assert settings.options["max_length"] == settings.longest + 1
    assert not [name for name in settings.changes() if name.startswith("options.")]
    assert _settled("linformer", preset, positions, pooling="mean").options["max_length"] == settings.longest
    with pytest.raises(ValueError, match="the model sees sequences of 1025 tokens"):
        _settled("linformer", preset, None, {"max_length": 1024}, pooling="cls")


def test_a_longest_sequence_that_is_too_short_raises():
    assert _settled("linformer", "demo", 4096, {"max_length": 5000}).options["max_length"] == 5000
    with pytest.raises(ValueError, match="option max_length of linformer is 1024 but the model sees sequences of 4096"):
        _settled("linformer", "demo", 4096, {"max_length": 1024})


@pytest.mark.long
def test_a_run_keeps_its_size_of_pictures(root, small_run, tmp_path):
    small, changes = noise(tmp_path / "small", 32), {"attention": "linear", "options": {}}
    run = small_run(tmp_path / "run", task="pathfinder", data=small, **SHORT, **changes)
    says = r"positions is 4096 \(the data's\) but was 1024 \(the preset's\)\. Resume with .* the data of the run"
    with pytest.raises(ValueError, match=says):
        small_run(run, task="pathfinder", data=root / "pathfinder-demo", resume=True, **SHORT, **changes)
    with pytest.raises(ValueError, match="holds a sample of 4096 tokens in test, but the model has 1024 positions"):
        evaluate(EvaluateOptions("pathfinder", model=run / "best", data=root / "pathfinder-demo", device="cpu"))


def _settled(attention, preset, positions, options=None, **changes):
    return Settings.resolve(
        train_options("pathfinder", device="cpu", attention=attention, options=options, preset=preset, **changes),
        num_positions=positions,
    )


@pytest.mark.long
def test_sequences_of_ones_own_length_make_as_many_positions_and_are_said_in_the_command(small_run, data, tmp_path):
    changes = SHORT | {"attention": "linformer", "options": {"num_features": 4}}
    run = small_run(tmp_path / "run", max_length=8_000, **changes)
    config = json.loads((run / "best" / "config.json").read_text())
    assert config["max_position_embeddings"] == 8_000
    assert config["attention_options"]["max_length"] == 8_000
    row = read_rows(run / "rows.csv")[0]
    assert row.n == 8_000
    assert "--max-length 8000" in row.command
    with pytest.raises(ValueError, match=r"positions is 512 \(the preset's\) but was 8000 \(--max-length\)"):
        small_run(run, resume=True, **changes)
    with pytest.raises(ValueError, match=r"max_length is 4000 but model .* has a table of 8000 positions"):
        small_run(tmp_path / "other", model=run / "best", max_length=4_000, **(changes | {"options": None}))


def test_a_length_has_data_of_its_own_and_pictures_have_none():
    longer = lengthened(find_preset("listops", "nystromformer"), 8_000).data
    assert (longer.folder, longer.min_length, longer.max_length, longer.train) == ("listops-8000", 500, 8_000, 96_000)
    with pytest.raises(ValueError, match="max_length is 4096, but pathfinder has images: leave it out"):
        lengthened(find_preset("pathfinder", "demo"), 4_096)
    with pytest.raises(ValueError, match="max_length is 400; expected a whole number of at least 502"):
        lengthened(find_preset("listops", "nystromformer"), 400)
