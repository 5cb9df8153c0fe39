"""The mean of the weights has its closed form, and is what a run evaluates and keeps."""

import torch
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close

from nystrom_lab.training.weight_mean import FILE, WeightMean


def test_the_mean_has_its_closed_form(tmp_path):
    model = nn.Linear(2, 2)
    mean, history = WeightMean(model, 0.3), [model.weight.detach().clone()]
    for step in range(1, 6):
        with torch.no_grad():
            model.weight.normal_(generator=torch.Generator().manual_seed(step))
        history.append(model.weight.detach().clone())
        mean.update(step)
    # (1 + t) / (10 + t) is 2/11, 3/12, 4/13 and then above 0.3.
    decays = [2 / 11, 3 / 12, 0.3, 0.3, 0.3]
    wanted, left = torch.zeros(2, 2), 1.0
    for weight, decay in zip(reversed(history[1:]), reversed(decays), strict=True):
        wanted += left * (1 - decay) * weight
        left *= decay
    assert_close(mean.mean["weight"], wanted + left * history[0])
    own = model.weight.detach().clone()
    with mean.in_place():
        assert torch.equal(model.weight, mean.mean["weight"])
    assert torch.equal(model.weight, own)
    mean.save(tmp_path)
    again = WeightMean(model, 0.3)
    again.load(tmp_path)
    assert_close(again.mean, mean.mean, rtol=0, atol=0)


def test_a_run_keeps_the_mean_of_its_weights(small_run, tmp_path, weights):
    run = small_run(tmp_path / "run", steps=3, warmup_steps=1, ema=0.9)
    best, mean = load_file(run / "best" / "model.safetensors"), load_file(run / "checkpoint-3" / FILE)
    assert_close(best, mean, rtol=0, atol=0)
    own = weights(run, 3)
    assert own.keys() == mean.keys()
    assert not torch.equal(own["classifier.dense.weight"], mean["classifier.dense.weight"])
