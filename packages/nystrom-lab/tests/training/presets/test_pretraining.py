"""The published settings of pretraining, and what follows from changes of them."""

from pathlib import Path

import pytest
from transformers import BertConfig

from nystrom_lab.config import PretrainOptions
from nystrom_lab.training.pretrain.pretrain_settings import PRETRAINING, PretrainingSettings, find_pretraining
from nystrom_lab.training.start import StartModel


def settled(preset, source=None, **changes):
    options = PretrainOptions(data=Path("data"), device="cpu", precision="float32", instances=10, **changes)
    return PretrainingSettings.resolve(options, find_pretraining(preset), source)


def trained(positions=512):
    return StartModel(Path("bert"), "checksum", BertConfig(vocab_size=30522, max_position_embeddings=positions))


@pytest.mark.parametrize(
    ("preset", "source", "steps", "warmup", "batch", "rate", "length", "layers"),
    [
        ("bert-small", None, 100_000, 10_000, 256, 1e-4, 512, 4),
        ("bert-base", None, 500_000, 10_000, 256, 1e-4, 512, 12),
        ("bert-base", trained(), 250_000, 10_000, 256, 1e-4, 512, 12),
        ("longer", trained(), 40_000, 0, 128, 1e-5, 1024, 12),
    ],
)
def test_settings_are_those_of_the_paper(preset, source, steps, warmup, batch, rate, length, layers):
    settings = settled(preset, source)
    assert (settings.steps, settings.warmup_steps, settings.batch_size) == (steps, warmup, batch)
    assert (settings.learning_rate, settings.length, settings.num_hidden_layers) == (rate, length, layers)
    assert settings.num_positions == length
    assert (settings.attention, settings.options, settings.conv_kernel_size) == ("nystrom", {"num_landmarks": 64}, 33)
    base = PRETRAINING[preset]
    assert (base.adam_betas, base.weight_decay) == ((0.9, 0.999), 0.01)


def test_fewer_steps_keep_the_share_of_the_warm_up():
    assert settled("bert-small", steps=1_000).warmup_steps == 100
    assert settled("bert-small", steps=1_000, warmup_steps=7).warmup_steps == 7
    assert settled("bert-small", steps=30).evaluate_every == 30


def test_a_longer_model_keeps_positions_that_suffice():
    assert settled("longer", trained(positions=2048)).num_positions == 2048
