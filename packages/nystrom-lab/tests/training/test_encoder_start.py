"""A training starts from an encoder: its weights, its settings, a new head; what contradicts it is refused."""

import json
import shutil
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from nystrom.models import EncoderForSequenceClassification
from nystrom_lab.measure.rows import read_rows
from nystrom_lab.training.arena import EncoderTrainer
from nystrom_lab.training.run_settings import train_options
from nystrom_lab.training.start import find_encoder
from nystrom_lab.training.train import train

SHORT: dict[str, Any] = {"steps": 2, "warmup_steps": 0, "evaluate_every": 2, "batch_size": 8}
SHORT |= {"log_every": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def pretrained(data, tmp_path_factory):
    """An encoder with settings that differ from those of its preset."""
    run = train(train_options(
        "listops", preset="demo", data=data, to=tmp_path_factory.mktemp("pretrained") / "run", mask_share=0.1,
        options={"num_landmarks": 8}, conv_kernel_size=5, position_kind="rotary", short_conv_kernel_size=3,
        feed_forward="gated", **SHORT,
    ))  # fmt: skip
    return run / "best"


@pytest.mark.long
def test_its_weights_go_into_the_model_and_the_head_is_that_of_a_run_from_nothing(
    pretrained, data, tmp_path, monkeypatch
):
    starts = []
    inner = EncoderTrainer.__init__

    def note(self, model, *given, **named):
        starts.append({name: weight.detach().clone() for name, weight in model.named_parameters()})
        inner(self, model, *given, **named)

    monkeypatch.setattr(EncoderTrainer, "__init__", note)
    run = train(train_options("listops", model=pretrained, data=data, to=tmp_path / "run", **SHORT))
    same = {"options": {"num_landmarks": 8}, "conv_kernel_size": 5, "position_kind": "rotary", "feed_forward": "gated"}
    train(
        train_options(
            "listops", preset="demo", data=data, to=tmp_path / "new", short_conv_kernel_size=3, **same, **SHORT
        )
    )
    encoder, (taken, new) = load_file(pretrained / "model.safetensors"), starts
    prefix = "nystromformer."
    assert_close({n.removeprefix(prefix): w for n, w in taken.items() if n.startswith(prefix)}, encoder)
    head = {name for name in taken if not name.startswith(prefix)}
    assert head == {f"classifier.{layer}.{part}" for layer in ("dense", "out_proj") for part in ("weight", "bias")}
    assert_close({name: taken[name] for name in head}, {name: new[name] for name in head})
    config = EncoderForSequenceClassification.from_pretrained(run / "best").config
    assert (config.positions, config.short_conv_kernel_size, config.feed_forward) == ("rotary", 3, "gated")
    assert (config.conv_kernel_size, config.attention_options) == (5, {"num_landmarks": 8})
    settings = json.loads((run / "run.json").read_text())["settings"]
    assert (settings["preset"], settings["model"]) == ("demo", str(pretrained))
    row = read_rows(run / "rows.csv")[0]
    assert f"model={settings['weights']}" in row.words
    assert "--model best" in row.command


@pytest.mark.long
def test_the_head_of_a_trained_model_is_not_taken(pretrained, data, tmp_path):
    first = train(train_options("listops", model=pretrained, data=data, to=tmp_path / "first", **SHORT))
    second = train(
        train_options(
            "listops", model=first / "best", data=data, to=tmp_path / "second", learning_rate=1e-9, seed=1, **SHORT
        )
    )
    before, after = (load_file(run / "best" / "model.safetensors") for run in (first, second))
    name = "nystromformer.encoder.layer.0.output.dense.weight"
    # Two steps of at most 1e-9 each.
    assert_close(after[name], before[name], rtol=0, atol=1e-7)
    assert (after["classifier.dense.weight"] - before["classifier.dense.weight"]).abs().max() > 1e-2


def test_a_run_that_started_from_it_is_resumed_as_long_as_it_is_the_same(pretrained, data, tmp_path):
    model = shutil.copytree(pretrained, tmp_path / "model")
    run = train(train_options("listops", model=model, preset="demo", data=data, to=tmp_path / "run", **SHORT))
    train(train_options("listops", model=model, preset="demo", data=data, to=run, resume=True, **SHORT))
    # A user changes the model.
    (model / "complete.json").unlink()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 1e-3}))
    with pytest.raises(ValueError, match="other settings: the configuration of its model changed"):
        train(train_options("listops", model=model, preset="demo", data=data, to=run, resume=True, **SHORT))
    with pytest.raises(ValueError, match="model is None but was"):
        train(train_options("listops", preset="demo", data=data, to=run, resume=True, **SHORT))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"attention": "softmax"}, "attention is 'softmax' but model .* was trained with 'nystrom': leave it out"),
        ({"options": {"num_landmarks": 16}}, "options.num_landmarks is 16 but model .* was trained with 8"),
        ({"options": {"pinv_steps": 3}}, "options.pinv_steps is 3 but model .* was trained with the default"),
        ({"conv_kernel_size": 0}, "conv_kernel_size is 0 but model .* was trained with 5"),
        ({"position_kind": "learned"}, "positions is 'learned' but model .* was trained with 'rotary'"),
        ({"short_conv_kernel_size": 5}, "short_conv_kernel_size is 5 but model .* was trained with 3"),
        ({"feed_forward": "plain"}, "feed_forward is 'plain' but model .* was trained with 'gated'"),
        ({"rotary_share": 0.5}, r"rotary_share is 0\.5 but model .* was trained with 1\.0"),
        ({"rotary_across_heads": True}, "rotary_across_heads is True but model .* was trained with False"),
        ({"design": "official"}, "design is 'official' but model .* was trained with 'transformers'"),
        ({"preset": "modern-small"}, "has hidden_size = 64 but preset modern-small has 128: leave --preset out"),
    ],
)
def test_what_contradicts_it_is_refused_by_name(pretrained, data, tmp_path, given, says):
    with pytest.raises(ValueError, match=says):
        train(train_options("listops", model=pretrained, data=data, to=tmp_path / "run", **given, **SHORT))
    assert not (tmp_path / "run").exists()


def test_the_encoder_of_another_vocabulary_and_folders_without_one_are_refused(pretrained, tmp_path):
    with pytest.raises(ValueError, match="has vocab_size = 17 but text has 257 tokens"):
        train(train_options("text", model=pretrained, to=tmp_path / "run", **SHORT))
    with pytest.raises(ValueError, match="the folder of a training: name its best model, "):
        train(train_options("listops", model=pretrained.parent, to=tmp_path / "run", **SHORT))
    with pytest.raises(ValueError, match=r"holds no model\.safetensors"):
        train(train_options("listops", model=tmp_path, to=tmp_path / "run", **SHORT))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="is of type 'bert'; expected 'nystrom'"):
        train(train_options("listops", model=tmp_path, to=tmp_path / "run", **SHORT))


def test_a_record_without_settings_names_no_preset(pretrained, tmp_path):
    (tmp_path / "best").symlink_to(pretrained)
    for content in ("{}", '{"settings": []}', '{"settings": {}}'):
        (tmp_path / "run.json").write_text(content)
        assert find_encoder(tmp_path / "best").preset is None


@pytest.mark.long
def test_inputs_beyond_its_projections_are_refused_before_a_run_begins(data, tmp_path):
    settings = SHORT | {"steps": 1, "evaluate_every": 1, "batch_size": 2, "data": data}
    rotary = {
        "attention": "linformer",
        "position_kind": "rotary",
        "preset": "demo",
        "mask_share": 0.5,
        "max_length": 600,
    }
    model = train(train_options("listops", to=tmp_path / "run", **rotary, **settings)) / "best"
    with pytest.raises(ValueError, match=r"max_length is 700 but model .* has projections \(linformer\) of 600 pos"):
        train(train_options("listops", model=model, to=tmp_path / "longer", max_length=700, **settings))
    with pytest.raises(ValueError, match=r"of 600 positions, but sequences would have 601, including the class token"):
        train(train_options("listops", model=model, to=tmp_path / "classed", pooling="cls", **settings))
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    trained = train(train_options("listops", model=model, to=tmp_path / "trained", **settings))
    assert json.loads((trained / "best" / "config.json").read_text())["max_position_embeddings"] == 600


@pytest.mark.long
def test_inputs_beyond_its_table_of_positions_are_refused(data, tmp_path):
    from nystrom_lab.data.lra.pathfinder.task import prepare_pathfinder

    sizes: dict[str, Any] = {"train": 8, "val": 2, "test": 2, "workers": 1}
    small, large = (prepare_pathfinder(tmp_path / str(size), size=size, **sizes) for size in (32, 64))
    short = SHORT | {"steps": 1, "evaluate_every": 1, "batch_size": 2}
    run = train(train_options("pathfinder", preset="demo", data=small, to=tmp_path / "run", mask_share=0.5, **short))
    with pytest.raises(ValueError, match="a sample of 4096 tokens in train, but the model has 1024 positions"):
        train(train_options("pathfinder", model=run / "best", data=large, to=tmp_path / "larger", **short))
