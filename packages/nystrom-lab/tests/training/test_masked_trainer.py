"""An encoder learns to predict masked tokens of a task's inputs, and no test split and no class is read."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.testing import assert_close

from nystrom.models import EncoderModel
from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.measure.rows import read_rows
from nystrom_lab.training.batches import masking, unmasked
from nystrom_lab.training.grid.run_grid import status_lines
from nystrom_lab.training.masked import MaskedTrainer
from nystrom_lab.training.run_settings import train_options

SHORT = {"steps": 6, "warmup_steps": 2, "evaluate_every": 3, "mask_share": 0.1}


def test_the_shares_are_those_of_self_pretraining():
    shares = {task: facts.mask_share for task, facts in LRA.items()}
    assert shares == {"listops": 0.1, "text": 0.15, "retrieval": 0.15, "image": 0.5, "pathfinder": 0.5}


@pytest.mark.parametrize(("length", "share", "count"), [(1024, 0.5, 512), (40, 0.1, 4), (3, 0.1, 1), (0, 0.1, 0)])
def test_a_share_of_the_tokens_is_masked_and_the_others_stay(length, share, count):
    tokens = np.arange(length, dtype=np.uint8) % 7
    before = tokens.copy()
    masked = masking(share, 256)(tokens, np.random.default_rng(0))
    ids, chosen = unmasked(torch.from_numpy(masked), 256)
    assert chosen.sum() == count
    assert ids.tolist() == before.tolist() == tokens.tolist()


def test_every_document_of_a_pair_is_masked_after_it_is_varied():
    crop = masking(0.5, 9, after=lambda pair, rng: tuple(text[:4] for text in pair))
    first, second = crop((np.ones(8, np.uint8), np.full(6, 2, np.uint8)), np.random.default_rng(0))
    assert sorted(first) == [1, 1, 10, 10]
    assert sorted(second) == [2, 2, 11, 11]


def test_the_loss_is_that_of_the_masked_tokens_alone(small_run, tmp_path, monkeypatch, curves):
    parts = []
    inner = MaskedTrainer._encode

    def note(self, model, inputs):
        x, ids, masked = inner(self, model, inputs)
        if model.training:
            with torch.no_grad():
                logits = self.denoiser.head(x)
                each = [F.cross_entropy(logits[i, masked[i]], ids[i, masked[i]]) for i in range(len(ids))]
                parts.append(torch.stack(each).mean())
            hidden = self.denoiser.masked(ids, masked, self.network.get_input_embeddings())
            assert (hidden[masked] == self.denoiser.mask).all()
        return x, ids, masked

    monkeypatch.setattr(MaskedTrainer, "_encode", note)
    run = small_run(tmp_path / "run", **(SHORT | {"steps": 3}))
    logged = [value for _, quantity, value in curves(run) if quantity == "train loss"]
    assert logged == pytest.approx([float(loss) for loss in parts], rel=1e-5)
    # At first no token of 17 is known.
    assert 2.0 < logged[0] < 4.0


def test_the_test_split_is_not_read(small_run, data, tmp_path, monkeypatch):
    from nystrom_lab.data.lra.listops.task import ListOps
    from nystrom_lab.training import tasks

    opened = []

    def note(folder, split):
        opened.append(split)
        return ListOps(folder, split)

    task = replace(tasks.find_task("listops"), open=note)
    monkeypatch.setitem(tasks.TASKS, "listops", lambda: task)
    run = small_run(tmp_path / "run", **SHORT)
    assert set(opened) == {"train", "val"}
    rows = {row.quantity: row for row in read_rows(run / "rows.csv")}
    assert {row.study for row in rows.values()} == {"pretrain listops"}
    assert "test accuracy" not in rows
    assert "mask_share=0.1" in rows["validation loss"].words
    assert rows["validation loss"].command.startswith("nystrom pretrain listops ")
    assert "--mask-share 0.1" in rows["validation loss"].command


def test_the_saved_model_is_the_encoder_without_head_and_mask(small_run, tmp_path, curves):
    run = small_run(tmp_path / "run", **SHORT)
    saved = load_file(run / "best" / "model.safetensors")
    assert not [name for name in saved if name.startswith(("denoiser", "classifier"))]
    best = min((value, step) for step, quantity, value in curves(run) if quantity == "validation loss")[1]
    of_best = load_file(run / f"checkpoint-{best}" / "model.safetensors")
    assert_close(EncoderModel.from_pretrained(run / "best").state_dict(), {name: of_best[name] for name in saved})
    line, count = status_lines(tmp_path)
    assert line.startswith("run: validation masked ")
    assert count == "1 of 1 finished"


@pytest.mark.long
def test_every_evaluation_masks_the_same_tokens_of_whole_pairs(pairs, tmp_path, monkeypatch):
    from nystrom_lab.training.train import train

    seen, places = [], []
    encode, sum_up = MaskedTrainer._encode, MaskedTrainer.sum_up

    def note(self, model, inputs):
        x, ids, masked = encode(self, model, inputs)
        if not model.training:
            places.extend(document.nonzero().flatten().tolist() for document in masked)
        return x, ids, masked

    def end(self, prediction):
        seen.append(places.copy())
        places.clear()
        return sum_up(self, prediction)

    monkeypatch.setattr(MaskedTrainer, "_encode", note)
    monkeypatch.setattr(MaskedTrainer, "sum_up", end)
    for seed, batch in ((0, 4), (1, 6)):
        train(train_options(
            "retrieval", preset="demo", data=pairs, to=tmp_path / str(seed), steps=2, warmup_steps=0, batch_size=batch,
            evaluate_every=1, mask_share=0.15, seed=seed, device="cpu",
        ))  # fmt: skip
    assert len(seen) == 4
    assert all(evaluation == seen[0] for evaluation in seen)
    assert all(seen[0])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"mask_share": 1.0}, r"mask_share is 1.0; expected a number in \[0, 1\)"),
        ({"denoise": 1.0}, "denoise is 1.0, but masked tokens have no class: leave it out"),
        ({"label_smoothing": 0.1}, "label_smoothing is 0.1, but masked tokens have no class"),
        ({"pooling": "max"}, "pooling is 'max', but masked tokens have no class"),
        ({"pooled_norm": "batch"}, "pooled_norm is 'batch', but masked tokens have no class"),
    ],
)
def test_what_masked_tokens_cannot_have_is_refused(small_run, tmp_path, wrong, says):
    with pytest.raises(ValueError, match=says):
        small_run(tmp_path / "run", **(SHORT | wrong))
    assert not (tmp_path / "run").exists()
