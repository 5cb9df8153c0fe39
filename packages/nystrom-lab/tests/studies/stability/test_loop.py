import math

import numpy as np
import pytest
import torch

from nystrom_lab.studies.stability.arena import new_model, random_batches
from nystrom_lab.studies.stability.loop import evaluate, train_plainly, validation_batches


@pytest.fixture
def train(listops, tmp_path):
    split = listops.open("train", tmp_path)
    validation = validation_batches(listops, listops.open("val", tmp_path), batch=8, count=2)

    def run(model, rate=1e-3, steps=6, every=3):
        return train_plainly(
            model, listops, split, validation, learning_rate=rate, steps=steps, batch=6, every=every, seed=2
        )

    return run, split, validation


def test_the_trace_holds_each_steps_loss_and_gradient_norm(train, listops):
    run, split, _ = train
    model, by_hand = (new_model(listops, "nystrom", seed=0) for _ in range(2))
    trace = run(model)
    (batch,) = random_batches(listops, split, batch=6, count=1, seed=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        loss = by_hand.train()(**batch).loss
    loss.backward()
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in by_hand.parameters() if p.grad is not None))
    assert trace.loss[0] == pytest.approx(loss.item(), rel=1e-5)
    assert trace.norm[0] == pytest.approx(norm, rel=1e-5)
    assert len(trace.loss) == len(trace.norm) == 6
    assert np.isfinite(trace.loss).all()


def test_it_evaluates_at_the_start_between_and_at_the_end(train, listops):
    run, _, validation = train
    model = new_model(listops, "softmax", seed=0)
    before = evaluate(model, validation)
    trace = run(model)
    assert trace.step.tolist() == [0, 3, 6]
    assert (trace.validation_loss[0], trace.accuracy[0]) == before
    assert (trace.validation_loss[-1], trace.accuracy[-1]) == evaluate(model, validation)
    assert (np.diff(trace.seconds) > 0).all()


def test_the_same_seed_trains_the_same_model_and_it_learns(train, listops):
    run, _, _ = train
    one, again = (run(new_model(listops, "skyformer", seed=0), rate=3e-3, steps=24, every=24) for _ in range(2))
    assert np.array_equal(one.loss, again.loss)
    assert one.loss[-6:].mean() < one.loss[:6].mean()


def test_a_loss_that_is_not_finite_ends_the_training(train, listops):
    run, _, _ = train
    model = new_model(listops, "softmax", seed=0)
    with torch.no_grad():
        model.classifier.out_proj.bias[0] = math.inf
    trace = run(model)
    assert not np.isfinite(trace.loss).any()
    assert trace.step.tolist() == [0]
