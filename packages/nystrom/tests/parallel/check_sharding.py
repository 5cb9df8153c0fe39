"""Sequences cut over ranks, beside other sequences on other ranks and sharded weights; run by `ranks.py`."""

import functools

import torch
import torch.distributed as dist
from check_models import CLOSE, PIECES, build
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from nystrom.models import EncoderForMaskedLM, EncoderForSequenceClassification
from nystrom.parallel import parallelize


def checks():
    for kind in (EncoderForSequenceClassification, EncoderForMaskedLM):
        for wrap in (shard_over_all, shard_in_groups, copy_to_all):
            yield (
                f"{kind.__name__} {wrap.__name__}",
                functools.partial(gradients_are_those_of_one_process, kind, wrap),
            )


def shard_over_all(model, mesh):
    everyone = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.nystromformer.encoder.layer:
        fully_shard(layer, mesh=everyone)
    return fully_shard(model, mesh=everyone)


def shard_in_groups(model, mesh):
    """Shards on the ranks that share a sequence, the same ones in each group."""
    for layer in model.nystromformer.encoder.layer:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def copy_to_all(model, mesh):
    return DistributedDataParallel(model)


def gradients_are_those_of_one_process(kind, wrap):
    model, source = build(kind).eval(), torch.Generator().manual_seed(1)
    batch = {
        "input_ids": torch.randint(30, (4, 23), generator=source),
        "attention_mask": torch.arange(23) < torch.tensor([[23], [9], [20], [6]]),
        "labels": torch.tensor([1, 0, 0, 1]),
    }
    if kind is EncoderForMaskedLM:
        # Every sequence has as many labels, so that the mean over groups is that of the batch.
        batch["labels"] = torch.where(torch.arange(23) % 5 == 3, batch["input_ids"], -100)
    expected = model(**batch).loss
    expected.backward()
    theirs = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tokens"))
    parallelize(model, mesh["tokens"])
    wrapped = wrap(model, mesh)
    mine = {name: x.chunk(mesh["data"].size())[mesh.get_local_rank("data")] for name, x in batch.items()}
    cut = mesh.get_local_rank("tokens")
    out = wrapped(**{name: x.split(PIECES, 1)[cut] if x.ndim == 2 else x for name, x in mine.items()})
    out.loss.backward()
    total = out.loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total / dist.get_world_size(), expected.detach(), **CLOSE)
    weights = dict(model.named_parameters())
    assert weights.keys() >= theirs.keys()
    for name, grad in theirs.items():
        found = weights[name].grad
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        torch.testing.assert_close(found, grad, **CLOSE, msg=lambda text, name=name: name + text)
