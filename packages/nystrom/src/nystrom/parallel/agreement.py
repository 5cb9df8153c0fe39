"""Checks that all ranks agree before they exchange tokens.

Each call gathers four integers from each rank: a hash of the facts that must be equal (method, options, shapes, dtypes,
devices, masks, gradients), whether the rank's own inputs are invalid, and how many queries and keys it holds. If
something differs, every rank sees it, the facts themselves are exchanged, and all ranks raise an error that names the
difference. Without this check, a rank with a different call would leave the others waiting until the group times out.
The others still wait if a rank raises before its tensors are checked, for example because of an invalid option.
"""

from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nystrom.parallel.communication import Ranks


def check_group(group: object) -> Ranks:
    """The ranks of a process group or of a mesh of one dimension; ValueError if it is neither, or this process not in
    it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "group is given, but torch.distributed has no process group: call torch.distributed.init_process_group "
            "first, and start the processes with torchrun."
        )
    mesh = getattr(group, "ndim", None)
    if mesh is not None and hasattr(group, "get_group"):
        if mesh != 1:
            raise ValueError(f"group is a mesh of {mesh} dimensions; expected one: pass mesh['name'] of the tokens.")
        group = group.get_group()  # pyright: ignore[reportAttributeAccessIssue]
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group does not include this process: pass it only on the ranks that belong to it.")
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group is a {type(group).__name__}; expected a torch.distributed.ProcessGroup, such as dist.group.WORLD."
        )
    return Ranks(group)


def agree(
    ranks: Ranks, facts: dict[str, object], held: tuple[int, int], refusal: ValueError | None
) -> list[tuple[int, int]]:
    """Compare facts by name across ranks, and exchange how many queries and keys each holds.

    Raises:
        ValueError: Ranks disagree, or one refuses its own inputs (`refusal`); raised on all ranks.
    """
    told = {name: str(fact) for name, fact in facts.items()}
    digest = int.from_bytes(blake2b(repr(told).encode(), digest_size=7).digest(), "big")
    here = torch.tensor([digest, refusal is not None, *held], device=_device(ranks))
    rows = ranks.gather(here).tolist()
    if all(not refused and number == digest for number, refused, *_ in rows):
        return [(queries, keys) for *_, queries, keys in rows]
    everything: list[Any] = [None] * ranks.size
    dist.all_gather_object(everything, (told, refusal and str(refusal)), group=ranks.group)
    if refusal is not None:
        raise refusal
    for rank, (_, refused) in enumerate(everything):
        if refused:
            raise ValueError(f"rank {rank} of the group has inputs that do not fit: {refused}")
    names = list(dict.fromkeys(name for facts, _ in everything for name in facts))
    different = [name for name in names if len({facts.get(name) for facts, _ in everything}) > 1]
    differences = "; ".join(
        f"{name} is " + ", ".join(f"{facts.get(name)} on rank {rank}" for rank, (facts, _) in enumerate(everything))
        for name in different
    )
    raise ValueError(
        f"ranks of the group disagree: {differences}. Pass the same on all ranks; only lengths may differ."
    )


def _device(ranks: Ranks) -> torch.device:
    """The device for tensors that the group sends: of the same kind on all ranks, regardless of their inputs."""
    # Such as "cuda:nccl" or "cpu:gloo,cuda:nccl".
    kinds = [part.partition(":")[0] for part in str(dist.get_backend_config(ranks.group)).split(",")]
    if "cuda" in kinds and "cpu" not in kinds:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def facts_of(name: str, value: object) -> dict[str, object]:
    """Facts that ranks must agree on for an argument: the value of a number or word, dtype and shape of a tensor."""
    if isinstance(value, Tensor):
        wants = value.requires_grad and torch.is_grad_enabled()
        return {name: f"{value.dtype} of {tuple(value.shape)}" + (" with a gradient" if wants else "")}
    if is_dataclass(value):
        return {field.name: repr(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, torch.Generator):
        return {name: "a generator"}
    return {name: repr(value)}
