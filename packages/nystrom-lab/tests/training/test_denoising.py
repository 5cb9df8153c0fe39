"""Denoising adds the loss of every token, and leaves evaluation and the saved model clean."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.testing import assert_close

from nystrom.models import EncoderConfig, EncoderForSequenceClassification
from nystrom_lab.config import EvaluateOptions
from nystrom_lab.training.denoising import Denoiser
from nystrom_lab.training.run_settings import train_options
from nystrom_lab.training.scoring import evaluate

SHORT = {"steps": 6, "warmup_steps": 2, "evaluate_every": 3, "denoise": 1.0}


def make(pad=0):
    torch.manual_seed(0)
    config = EncoderConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, pad_token_id=pad
    )
    return EncoderForSequenceClassification(config), Denoiser(config)


@pytest.mark.parametrize("pad", [0, None])
def test_three_tokens_in_ten_are_corrupted_and_one_of_them_by_a_random_token(pad):
    model, denoiser = make(pad)
    words = model.get_input_embeddings()
    ids, keep = torch.full((40, 1000), 5), torch.ones(40, 1000, dtype=torch.bool)
    keep[:, 900:] = False
    x = denoiser.corrupt(ids, keep, words).detach()
    masked = (x == denoiser.mask).all(-1)
    kept = (x == words.weight[5]).all(-1)
    # 36,000 tokens: five standard deviations of a share are about .011.
    assert masked[:, :900].float().mean().item() == pytest.approx(0.2, abs=0.011)
    assert kept[:, 900:].all()
    others = x[~masked & ~kept]
    named = (others[:, None] == words.weight).all(-1)
    assert named.any(-1).all()
    assert set(named.int().argmax(-1).tolist()) == set(range(9)) - {5} - ({0} if pad == 0 else set())
    # One in ten became random, of which one in eight, or nine, is the same token again.
    stays = 1 / 8 if pad == 0 else 1 / 9
    assert len(others) / 36_000 == pytest.approx(0.1 * (1 - stays), abs=0.009)


def test_the_loss_is_the_mean_over_sequences_of_that_over_their_tokens():
    _, denoiser = make()
    x, ids = torch.randn(3, 6, 8), torch.randint(1, 9, (3, 6))
    keep = torch.tensor([[1] * 6, [0, 1, 1, 0, 0, 0], [0] * 6]).bool()
    logits = denoiser.head(x)
    wanted = [F.cross_entropy(logits[i, keep[i]], ids[i, keep[i]]) for i in (0, 1)]
    assert_close(denoiser.loss(x, ids, keep), sum(wanted) / 3)
    assert_close(denoiser.loss(x, ids, None), F.cross_entropy(logits.flatten(0, 1), ids.flatten()))


def test_every_weight_that_learns_takes_part():
    # Several processes would wait for the gradient of one that does not.
    _, denoiser = make()
    ids = torch.randint(1, 9, (3, 6))
    chosen = torch.ones_like(ids, dtype=torch.bool)
    x = denoiser.masked(ids, chosen, torch.nn.Embedding(9, 8))
    denoiser.loss(x, ids, chosen).backward()
    assert [name for name, weight in denoiser.named_parameters() if weight.requires_grad and weight.grad is None] == []


@pytest.mark.long
@pytest.mark.parametrize("words", [["train", "listops", "--denoise", "0.5"], ["pretrain", "listops"]])
def test_two_processes_share_the_batches(words, torchrun, data, tmp_path):
    done = torchrun(
        2, *words, "--preset", "demo", "--steps", 3, "--warmup-steps", 1, "--batch-size", 8, "--evaluate-every", 3,
        "--device", "cpu", "--threads", 1, "--data", data, "--to", tmp_path / "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "checkpoint-3").is_dir()


def test_the_loss_of_a_step_is_that_of_the_class_and_of_the_tokens(small_run, tmp_path, after_forward, curves):
    parts = {"class": [], "tokens": []}

    def note(model, inputs, output):
        if model.training:
            assert "input_ids" not in inputs
            parts["class"].append((output.logits.detach(), output.hidden_states[-1].detach()))

    after_forward(EncoderForSequenceClassification, note)
    run = small_run(tmp_path / "run", **(SHORT | {"steps": 3, "dropout": 0.0}))
    losses = [value for _, quantity, value in curves(run) if quantity == "train loss"]
    # At first no token of 15 and no class of 10 is known: log 16 + log 10 or so.
    assert 4.0 < losses[0] < 6.5
    assert len(parts["class"]) == 3
    saved = load_file(run / "best" / "model.safetensors")
    assert not [name for name in saved if name.startswith("denoiser")]
    assert any(name.startswith("denoiser") for name in load_file(run / "checkpoint-3" / "model.safetensors"))


def test_a_denoising_run_is_scored_on_clean_inputs(small_run, data, tmp_path, curves):
    run = small_run(tmp_path / "run", augment=True, **SHORT)
    values = [value for _, quantity, value in curves(run) if quantity == "validation accuracy"]
    assert evaluate(EvaluateOptions("listops", model=run / "best", data=data, split="val", device="cpu")).value == max(
        values
    )


def test_pairs_of_texts_are_denoised_and_cropped(pairs, tmp_path):
    from nystrom_lab.training.train import train

    run = train(train_options(
        "retrieval", preset="demo", data=pairs, to=tmp_path / "run", steps=2, warmup_steps=0, batch_size=4,
        denoise=1.0, augment=True, device="cpu",
    ))  # fmt: skip
    assert (run / "rows.csv").is_file()


def test_compiling_it_is_refused(small_run, tmp_path):
    with pytest.raises(ValueError, match="compile is on, but denoise"):
        small_run(tmp_path / "run", compile=True, **SHORT)


@pytest.mark.long
def test_the_loss_over_ranks_is_that_of_one_process(run_on_ranks):
    errors = run_on_ranks(Path(__file__).with_name("check_denoising.py"), 2)
    assert errors == {"denoising masked": [], "denoising open": []}
