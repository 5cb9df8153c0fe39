"""Each part of the recipe that lifts attention does in a training what its words say."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import Trainer

from nystrom.models import EncoderConfig, EncoderForSequenceClassification
from nystrom_lab.measure.rows import read_rows

SHORT = {"steps": 6, "warmup_steps": 2, "evaluate_every": 6, "learning_rate": 1e-3}


@pytest.mark.parametrize(
    ("schedule", "rate"),
    [
        ("cosine", lambda i: (1 + math.cos(math.pi * (i - 2) / 4)) / 2),
        ("constant", lambda i: 1.0),
        ("rsqrt", lambda i: (2 / i) ** 0.5),
    ],
)
def test_the_schedule_is_its_closed_form(small_run, tmp_path, curves, schedule, rate):
    run = small_run(tmp_path / "run", schedule=schedule, **SHORT)
    rates = [value for _, quantity, value in curves(run) if quantity == "learning rate"]
    # From 0 over two steps of warm-up; the point of a step is the rate that it was made with.
    assert rates == pytest.approx([1e-3 * (i / 2 if i < 2 else rate(i)) for i in range(6)])


def test_the_inverse_root_of_the_step_needs_no_warm_up(small_run, tmp_path, curves):
    run = small_run(tmp_path / "run", schedule="rsqrt", **SHORT | {"warmup_steps": 0})
    rates = [value for _, quantity, value in curves(run) if quantity == "learning rate"]
    assert rates == pytest.approx([1e-3 / (i + 1) ** 0.5 for i in range(6)])


@pytest.mark.long
def test_the_norm_of_the_gradient_is_clipped(small_run, tmp_path, around_step, curves):
    norms = {}

    def note(weights):
        norms.setdefault(clip, []).append(float(torch.nn.utils.get_total_norm([w.grad for w in weights])))

    around_step(before=note)
    for clip in (0.0, 0.5):
        run = small_run(tmp_path / str(clip), clip_norm=clip, **SHORT)
        logged = [value for _, quantity, value in curves(run) if quantity == "gradient norm"]
        # The logged norm is the one before clipping.
        assert min(logged) > 0.5
    assert min(norms[0.0]) > 0.5
    # Clipping divides by the norm plus 1e-6.
    assert norms[0.5] == pytest.approx([0.5] * 6, rel=1e-4)


@pytest.mark.long
def test_labels_are_smoothed_in_training_alone_as_torch_does(small_run, tmp_path, after_forward, curves):
    losses = {True: [], False: []}

    def note(model, inputs, output):
        smoothing = 0.2 if model.training else 0.0
        logits = output.logits.detach()
        losses[model.training].append(F.cross_entropy(logits, inputs["labels"], label_smoothing=smoothing))

    after_forward(EncoderForSequenceClassification, note)
    run = small_run(tmp_path / "run", label_smoothing=0.2, **SHORT)
    logged = [value for _, quantity, value in curves(run) if quantity == "train loss"]
    assert logged == pytest.approx([float(loss) for loss in losses[True]], rel=1e-5)
    evaluated = [value for _, quantity, value in curves(run) if quantity == "validation loss"]
    # Batches of 8, 8 and 4.
    means = [float(loss) for loss in losses[False]][:3]
    assert evaluated == pytest.approx([(8 * means[0] + 8 * means[1] + 4 * means[2]) / 20], rel=1e-5)


def test_weights_decay_but_biases_and_norms_do_not():
    config = EncoderConfig(
        vocab_size=17, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, norm="pre",
        conv_kernel_size=3, short_conv_kernel_size=3, feed_forward="gated", num_labels=2,
    )  # fmt: skip
    model = EncoderForSequenceClassification(config)
    decaying = set(Trainer.get_decay_parameter_names(None, model))
    for name, _ in model.named_parameters():
        assert (name in decaying) == (not name.endswith("bias") and "LayerNorm" not in name), name


def test_a_run_has_the_betas_and_the_decay_that_were_asked_for(small_run, tmp_path, around_step, monkeypatch):
    groups = []
    inner = torch.optim.AdamW.step

    def step(self, *given, **named):
        groups.append([(group["betas"], group["weight_decay"]) for group in self.param_groups])
        return inner(self, *given, **named)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    small_run(tmp_path / "run", adam_betas=(0.9, 0.98), weight_decay=0.04, **SHORT)
    assert groups[0] == [((0.9, 0.98), 0.04), ((0.9, 0.98), 0.0)]


def test_a_model_without_attention_is_trained_and_named_so(small_run, tmp_path):
    none = {"attention": "none", "options": None, "short_conv_kernel_size": 3, "position_kind": "none"}
    row = read_rows(small_run(tmp_path / "run", **none, **SHORT) / "rows.csv")[0]
    assert row.method == "none"
    assert "short_conv_kernel_size=3" in row.words
    assert "--attention none" in row.command
    assert "--positions none" in row.command
