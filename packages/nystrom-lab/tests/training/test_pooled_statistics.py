"""The statistics of pooled tokens in evaluation are measured on training samples without dropout."""

import pytest
import torch
from torch.testing import assert_close

from nystrom.models import EncoderForSequenceClassification
from nystrom_lab.training.tasks import find_task

SHORT = {"pooled_norm": "batch", "steps": 6, "warmup_steps": 2, "evaluate_every": 3}


def fixed_values(run, step):
    norm = EncoderForSequenceClassification.from_pretrained(run / f"checkpoint-{step}").classifier.norm
    return norm.running_mean, norm.running_var


@pytest.mark.long
@pytest.mark.parametrize("changes", [{"dropout": 0.3}, {"denoise": 1.0}], ids=["dropout", "denoise"])
def test_the_fixed_values_are_those_of_clean_training_samples(small_run, data, tmp_path, changes):
    check_fixed_values(small_run(tmp_path / "run", **SHORT, **changes), data)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [1, 2], ids=["a share of the samples each", "a piece of every sample each"])
def test_they_are_those_of_all_processes(torchrun, data, tmp_path, shared):
    words = ["train", "listops", "--preset", "demo", "--options.num-landmarks", 8, "--steps", 6, "--batch-size", 8]
    words += ["--evaluate-every", 6, "--pooled-norm", "batch", "--context-parallel", shared, "--device", "cpu"]
    done = torchrun(2, *words, "--data", data, "--to", tmp_path / "run")
    assert done.returncode == 0, done.stderr[-3000:]
    check_fixed_values(tmp_path / "run", data)


def check_fixed_values(run, data):
    samples = find_task("listops").open(data, "train")
    # Fewer than are measured at most, in whole batches of eight.
    assert len(samples) % 8 == 0
    model, seen = EncoderForSequenceClassification.from_pretrained(run / "checkpoint-6"), []
    model.classifier.norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    batch = find_task("listops").collate([samples[i] for i in range(len(samples))])
    batch.pop("labels")
    with torch.no_grad():
        model(**batch)
    mean, variance = fixed_values(run, 6)
    # float32, in batches of other lengths.
    assert_close(mean, seen[0].mean(dim=0), rtol=1e-4, atol=1e-5)
    assert_close(variance, seen[0].var(dim=0, correction=0), rtol=1e-3, atol=1e-6)


def test_one_sample_at_a_time_is_refused(small_run, tmp_path):
    with pytest.raises(ValueError, match="pooled_norm is 'batch', but a process computes one sample at a time"):
        small_run(tmp_path / "run", accumulation=8, **SHORT)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_masked_training_ignores_the_norm_of_a_preset_and_takes_one_sample_at_a_time(small_run, tmp_path):
    short = {"steps": 2, "warmup_steps": 1, "evaluate_every": 2, "max_length": 64}
    run = small_run(tmp_path / "run", preset="modern-small", accumulation=8, mask_share=0.1, **short)
    assert (run / "best" / "model.safetensors").is_file()
