"""Presets have the numbers of the papers' code."""

import pytest
import torch
from torch.nn.functional import elu
from torch.testing import assert_close

from nystrom.attention.heads import build_attention
from nystrom.attention.method_names import NO_ATTENTION
from nystrom.attention.registry import METHODS
from nystrom.gpu import launch
from nystrom.models import EncoderForSequenceClassification
from nystrom_lab.config import TrainOptions
from nystrom_lab.training.hardware import usable_precision
from nystrom_lab.training.presets import PRESETS, find_preset
from nystrom_lab.training.run_settings import Settings, train_options
from nystrom_lab.training.train import train

TASKS = ("listops", "text", "retrieval", "image", "pathfinder")


def settled(preset, attention="nystrom", task="listops", **changes):
    how = {name: changes.pop(name) for name in ("num_positions", "start", "elsewhere") if name in changes}
    options = {"device": "cpu"} | changes.pop("changes", {}) | changes
    return Settings.resolve(train_options(task, attention=attention, preset=preset, **options), **how)


@pytest.mark.parametrize("name", ["nystromformer", "skyformer", "demo"])
@pytest.mark.parametrize("task", TASKS)
def test_the_papers_share_one_model_and_optimiser(task, name):
    preset = find_preset(task, name)
    assert (preset.num_hidden_layers, preset.hidden_size) == (2, 64)
    assert (preset.intermediate_size, preset.num_attention_heads) == (128, 2)
    assert (preset.norm, preset.pooling, preset.dropout) == ("pre", "mean", 0.1)
    assert (preset.adam_betas, preset.adam_epsilon, preset.weight_decay) == ((0.9, 0.999), 1e-6, 0)
    assert (preset.design, preset.drop_weights) == ("transformers" if name == "demo" else "authors", False)


@pytest.mark.parametrize(
    ("name", "table"),
    [
        # Numbers of the tasks in their order.
        ("nystromformer", [(32, 1e-4, 1_000, 5_000), (32, 1e-4, 8_000, 20_000), (32, 1e-4, 800, 30_000),
                           (256, 1e-4, 175, 35_000), (256, 1e-4, 312, 62_400)]),
        ("skyformer", [(32, 1e-4, 1_000, 50_000), (16, 1e-4, 80, 50_000), (16, 2e-4, 800, 50_000),
                       (256, 1e-4, 175, 50_000), (128, 2e-4, 312, 50_000)]),
    ],
)  # fmt: skip
def test_batches_rates_warm_ups_and_steps_are_the_papers(name, table):
    for task, wanted in zip(TASKS, table, strict=True):
        preset = find_preset(task, name)
        assert (preset.batch_size, preset.learning_rate, preset.warmup_steps, preset.steps) == wanted, task
        clip = (None, 0.0) if name == "nystromformer" else (1.0, 0.2)
        assert (preset.clip_value, preset.best_after) == clip
        assert preset.evaluate_every % preset.log_every == 0


@pytest.mark.parametrize(("name", "features"), [("nystromformer", 256), ("skyformer", 128)])
@pytest.mark.parametrize(
    ("task", "positions"),
    [("listops", 2_000), ("text", 4_000), ("retrieval", 4_000), ("image", 1_024), ("pathfinder", 1_024)],
)
def test_methods_have_the_sizes_of_the_papers_at_every_length(name, features, task, positions):
    methods = find_preset(task, name).methods(positions)
    options = methods["linformer"].options
    assert (options["num_features"], options["max_length"]) == (features, positions)
    assert methods["performer"].options == {"num_features": features}
    assert methods["nystrom"].conv_kernel_size == (35 if name == "nystromformer" else None)
    assert settled(name, task=task).encoder_config().max_position_embeddings == positions


@pytest.mark.parametrize("name", ["nystromformer", "skyformer"])
@pytest.mark.parametrize(
    ("task", "buckets"), [("listops", 64), ("text", 126), ("retrieval", 126), ("image", 32), ("pathfinder", 32)]
)
def test_reformer_has_the_buckets_of_both_papers_code_and_attends_across_them(name, task, buckets):
    # 2 n / 64: the code of both papers leaves the number to transformers' Reformer.
    options = settled(name, "reformer", task=task).options
    assert options == {"num_hashes": 2, "chunk_size": 64, "num_buckets": buckets, "across_buckets": True}


def test_reformer_has_as_many_more_buckets_as_a_picture_has_pixels():
    options = settled("skyformer", "reformer", task="pathfinder", num_positions=4_096).options
    assert options["num_buckets"] == 128


@pytest.mark.parametrize(
    ("name", "frozen"),
    [("nystromformer", False), ("nystromformer-1000", False), ("skyformer", True), ("skyformer-1000", True)],
)
def test_linformer_has_the_projections_of_each_papers_code(name, frozen):
    config = settled(name, "linformer", task="text").encoder_config()
    torch.manual_seed(0)
    model = EncoderForSequenceClassification(config)
    found = {name: weight for name, weight in model.named_parameters() if "projection" in name}
    # One a head, for keys and values: Nyströmformer's code shares it and trains it, Skyformer's does neither.
    assert len(found) == (2 if frozen else 1)
    features = 128 if frozen else 256
    for weight in found.values():
        assert weight.shape == (2, features, 1_000 if name.endswith("1000") else 4_000)
        # A quarter of a million normal numbers and more: a standard deviation is known to a percent.
        assert weight.std().item() == pytest.approx(0.02, rel=0.01)
        assert weight.requires_grad is not frozen
    model(torch.randint(1, 200, (1, 300))).logits.square().sum().backward()
    for weight in found.values():
        assert weight.grad is None if frozen else weight.grad.abs().max() > 0


def test_the_mean_of_the_papers_code_is_ours_times_the_share_of_real_tokens():
    config = settled("nystromformer", "softmax").encoder_config()
    torch.manual_seed(0)
    model = EncoderForSequenceClassification(config).eval()
    ids, keep = torch.randint(1, 16, (2, 64)), torch.arange(64) < torch.tensor([[16], [48]])
    seen = []
    model.classifier.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(ids, keep)
    # LRA/code/model.py multiplies by the mask, and pooling in model_wrapper.py divides by all positions.
    theirs = (model.nystromformer(ids, keep).last_hidden_state * keep[..., None]).mean(dim=1)
    assert_close(theirs, seen[0] * torch.tensor([[0.25], [0.75]]))


def test_linear_attention_of_nystromformers_code_is_ours_without_its_denominator():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 30, 8)
    keep = torch.arange(30) < torch.tensor([[20], [30]])
    options = find_preset("listops", "nystromformer").methods(30)["linear"].options
    ours = build_attention("linear", num_heads=2, head_dim=8, **options)(q, k, v, keep=keep)
    phi_q, phi_k = elu(q) + 1, (elu(k) + 1) * keep[:, None, :, None]
    # LRA/code/attention_linear.py, in which each feature is divided by the fourth root of the positions.
    theirs = (phi_q / 30**0.25) @ ((phi_k / 30**0.25).mT @ v)
    sums = phi_q @ phi_k.sum(dim=2)[..., None]
    assert_close(theirs, torch.where(keep[:, None, :, None], ours * sums / 30**0.5, theirs))


def test_text_comes_in_the_length_of_the_tables_and_in_that_of_the_released_code():
    for name in ("nystromformer", "skyformer"):
        table, code = find_preset("text", name), find_preset("text", f"{name}-1000")
        assert (table.data.max_length, code.data.max_length) == (4_000, 1_000)
        assert (table.data.folder, code.data.folder) == ("text", "text-1000")
        assert (table.steps, table.batch_size, table.warmup_steps) == (code.steps, code.batch_size, code.warmup_steps)
        with pytest.raises(ValueError, match=f"preset '{name}-1000' is unknown"):
            find_preset("listops", f"{name}-1000")


@pytest.mark.parametrize(
    ("name", "attention", "options", "taps", "every"),
    [
        ("nystromformer", "nystrom", {"num_landmarks": 128, "pinv_steps": 6}, 35, 50),
        ("skyformer", "nystrom", {"num_landmarks": 128, "pinv_steps": 6}, None, 500),
        ("skyformer", "skyformer", {"num_landmarks": 128, "gamma": 0.1, "pinv_steps": 6}, None, 500),
    ],
)
def test_each_method_has_the_options_of_its_code(name, attention, options, taps, every):
    config = settled(name, attention).encoder_config()
    assert (config.attention_options, config.conv_kernel_size) == (options, taps)
    assert find_preset("listops", name).evaluate_every == every


@pytest.mark.parametrize("name", ["nystromformer", "skyformer"])
def test_listops_has_the_sizes_of_the_long_range_arena(name):
    data = find_preset("listops", name).data
    assert (data.train, data.val, data.test, data.min_length, data.max_length) == (96_000, 2_000, 2_000, 500, 2_000)


@pytest.mark.parametrize(
    ("task", "sizes", "training"),
    [
        ("listops", (6, 80, 160), (64, 1e-3, 3_000, 90_000, 0.1, 0.01)),
        ("text", (4, 128, 256), (50, 4e-3, 10_000, 25_000, 0.1, 0.01)),
        ("retrieval", (6, 128, 256), (64, 1e-3, 10_000, 92_000, 0.1, 0.04)),
        ("image", (8, 160, 320), (50, 5e-4, 9_000, 180_000, 0.0, 0.02)),
        ("pathfinder", (6, 128, 256), (128, 1e-3, 50_000, 250_000, 0.0, 0.01)),
    ],
)
def test_modern_has_the_sizes_of_mega_and_the_rates_of_attention(task, sizes, training):
    preset = find_preset(task, "modern")
    assert (preset.num_hidden_layers, preset.hidden_size, preset.intermediate_size) == sizes
    assert (preset.batch_size, preset.learning_rate, preset.warmup_steps, preset.steps) == training[:4]
    assert (preset.dropout, preset.weight_decay) == training[4:]
    assert (preset.clip_norm, preset.adam_betas, preset.schedule) == (1.0, (0.9, 0.98), "linear")
    config = settled("modern", task=task).encoder_config()
    assert (config.positions, config.rotary_share, config.rotary_across_heads) == ("rotary", 0.5, True)
    assert (config.short_conv_kernel_size, config.feed_forward, config.conv_kernel_size) == (3, "gated", None)
    assert settled("modern", "none", task=task).encoder_config().positions == "none"
    # Nothing is changed of a preset by taking it, and a change of the positions alone is one change.
    assert settled("modern", task=task).changes() == settled("modern", "none", task=task).changes() == {}
    learned = settled("modern", task=task, changes={"position_kind": "learned"})
    assert learned.changes() == {"positions": "learned"}
    assert learned.encoder_config().rotary_share == 1


@pytest.mark.parametrize(
    ("task", "width", "taps", "pooling", "feed_forward"),
    [
        ("listops", 128, 3, "mean", "gated"),
        ("text", 128, 13, "max", "plain"),
        ("retrieval", 64, 13, "mean", "plain"),
        ("image", 64, 65, "max", "plain"),
        ("pathfinder", 64, 65, "max", "plain"),
    ],
)
def test_modern_small_norms_the_pooled_tokens_of_every_task(task, width, taps, pooling, feed_forward):
    config = settled("modern-small", task=task).encoder_config()
    assert (config.num_hidden_layers, config.hidden_size, config.pooled_norm) == (2, width, "batch")
    assert (config.short_conv_kernel_size, config.pooling, config.feed_forward) == (taps, pooling, feed_forward)


def test_a_preset_names_methods_that_exist():
    for (task, name), preset in PRESETS.items():
        assert (preset.task, preset.name) == (task, name)
        assert preset.methods(preset.data.max_length).keys() <= METHODS.keys() | {NO_ATTENTION}


def test_every_preset_makes_a_model_with_every_method():
    for task, name in PRESETS:
        for attention in METHODS:
            assert settled(name, attention, task=task).encoder_config().task == task


def test_a_method_without_an_entry_has_its_defaults_and_no_convolution():
    config = settled("nystromformer", "skyformer").encoder_config()
    assert (config.attention_options, config.conv_kernel_size) == ({}, None)


def test_given_settings_override_the_preset():
    given = {"options": {"num_landmarks": 32}, "conv_kernel_size": 0, "learning_rate": 1e-3}
    settings = settled("nystromformer", **given)
    assert settings.options == {"num_landmarks": 32, "pinv_steps": 6}
    assert settings.conv_kernel_size is None
    assert (settings.learning_rate, settings.steps) == (1e-3, 5000)


def test_a_shorter_run_has_a_shorter_warm_up_and_is_evaluated():
    settings = settled("nystromformer", steps=20)
    # 1,000 of 5,000 steps in the preset, and an evaluation every 50.
    assert (settings.warmup_steps, settings.evaluate_every, settings.log_every) == (4, 20, 20)
    # A longer run has the preset's.
    assert settled("nystromformer", steps=50_000).warmup_steps == 1_000
    assert settled("nystromformer", steps=20, warmup_steps=7).warmup_steps == 7
    # The interval of the curve follows that of the evaluation.
    assert [settled("demo", evaluate_every=every).log_every for every in (50, 200)] == [50, 20]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"preset": "demos"}, "preset 'demos' is unknown.*'demo'"),
        ({"attention": "nystorm"}, "attention 'nystorm' is unknown"),
        ({"options": {"landmark": 2}}, "option of nystrom 'landmark' is unknown"),
        ({"conv_kernel_size": 4}, "conv_kernel_size is 4"),
        ({"seed": -1}, "seed is -1"),
        ({"accumulation": 3}, "batch_size is 32 but 1 processes share it, each in accumulation = 3 parts.*multiple"),
        ({"changes": {"steps": 0}}, "steps is 0"),
        ({"changes": {"steps": 500, "warmup_steps": 1000}}, "warmup_steps is 1000 but steps is 500"),
        ({"changes": {"learning_rate": 0.0}}, "learning_rate is 0.0"),
        ({"changes": {"dropout": 1.0}}, "hidden_dropout_prob is 1.0"),
        ({"changes": {"evaluate_every": 50, "log_every": 20}}, "log_every is 20 but evaluate_every is 50"),
        ({"schedule": "step"}, "schedule is 'step'; expected one of 'linear', 'cosine', 'constant', 'rsqrt'"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0; expected a number of at least 0"),
        ({"adam_betas": (0.9, 1.0)}, r"adam_betas is \(0.9, 1.0\)"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0"),
        ({"short_conv_kernel_size": 4}, "short_conv_kernel_size is 4; expected an odd number"),
        ({"changes": {"position_kind": "sine"}}, "positions is 'sine'"),
        ({"rotary_share": 0.5}, "rotary_share is 0.5 but positions is 'learned'"),
        ({"attention": "none", "changes": {"position_kind": "rotary"}}, "has no queries and keys to rotate"),
        ({"precision": "float8"}, "precision is 'float8'"),
        ({"precision": "float16"}, "precision is 'float16' but device is 'cpu'"),
        ({"device": "tpu"}, "device is 'tpu'"),
    ],
)
def test_settings_that_cannot_be_used_raise(wrong, says):
    with pytest.raises(ValueError, match=says):
        settled(**({"preset": "nystromformer"} | wrong))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_missing_accelerator_raises():
    with pytest.raises(ValueError, match="device is 'cuda', but torch finds none here"):
        settled("demo", device="cuda")


def test_auto_means_bfloat16_on_an_accelerator_that_has_it():
    assert usable_precision("auto", "cuda", has_bfloat16=True) == "bfloat16"
    assert usable_precision("auto", "cuda", has_bfloat16=False) == "float32"
    with pytest.raises(ValueError, match=r"precision is 'bfloat16'.*use 'float16' or 'float32'"):
        usable_precision("bfloat16", "cuda", has_bfloat16=False)


@pytest.mark.refuses
def test_kernels_without_a_gpu_raise_before_data_are_made(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "INTERPRETED", type(launch.INTERPRETED)(False))
    with pytest.raises(ValueError, match=r"backend 'triton' needs a CUDA device, not cpu.*backend='torch'"):
        train(train_options("listops", preset="demo", options={"backend": "triton"}, device="cpu", to=tmp_path / "run"))
    assert not any(tmp_path.iterdir())


def test_the_command_names_every_preset():
    assert all(f'"{name}"' in (TrainOptions.__doc__ or "") for _, name in PRESETS)
