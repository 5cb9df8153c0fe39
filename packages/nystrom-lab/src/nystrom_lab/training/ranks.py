"""A run over several processes: how they connect, how a lost one is named, and samples split across them.

A process that dies closes its connections, which the others notice at once; torchrun says which one it was. A process
that hangs is noticed after the timeout. Then those that still respond sign in to the store through which they
connected, and the others are named.

With samples split across processes (context parallelism) each holds a piece of their tokens. The W processes form a
mesh ("data", "tokens") of W / N groups of N neighbours. The ranks of a group load the same samples, pad them, and each
keeps its piece of the tokens; pieces differ by one token at most. The model is one of `nystrom.parallel.parallelize`,
so that every rank has the whole loss of its group, and the mean of the gradients over all W ranks, as
DistributedDataParallel takes it, is the gradient of the batch. Scores are gathered from one rank of each group. Each
rank applies dropout to its own tokens, with its own generator. After the pooling, where the ranks of a group hold the
same values, a step averages over their draws.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, ParamSpec, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.utils.data import DataLoader

from nystrom.parallel import parallelize
from nystrom_lab.training.hardware import LostRanks

P = ParamSpec("P")
R = TypeVar("R")

# Seconds in which those that still answer sign.
_GRACE = 10.0
_SIGNED = "nystrom/answers"
_DRAWN = "nystrom/drawn"


def connect(device: str, timeout: timedelta) -> None:
    """Connect to the other processes, on the CPU; transformers passes its timeout on only for accelerators.

    Args:
        timeout: How long to wait for the other processes.

    Raises:
        LostRanks: They did not connect.
    """
    if device != "cpu" or dist.is_initialized():
        return
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        dist.init_process_group(
            "gloo", store=own_place(store, rank, size, timeout), rank=rank, world_size=size, timeout=timeout
        )
    except dist.DistError as error:
        raise LostRanks(
            f"the processes did not connect ({error}): start all of them, or increase --timeout."
        ) from error


def own_place(store: Store, rank: int, size: int, timeout: timedelta) -> PrefixStore:
    """A place in the store used only by the processes of this start.

    torchrun restarts processes with the same store, which still holds the addresses of dead ones. So each process draws
    a random number, and the first answers each of them with its own until all have seen it: nothing from a former start
    can be such an answer.
    """
    mine = uuid4().hex
    if rank:
        store.set(f"{_DRAWN}/{rank}", mine)
        place = store.get(f"{_DRAWN}/answer to {mine}").decode()
        store.set(f"{_DRAWN}/{mine} in {place}", "")
        return PrefixStore(place, store)
    deadline = time.monotonic() + timeout.total_seconds()
    waiting = set(range(1, size))
    while waiting:
        for other in tuple(waiting):
            if store.check([f"{_DRAWN}/{other}"]):
                theirs = store.get(f"{_DRAWN}/{other}").decode()
                store.set(f"{_DRAWN}/answer to {theirs}", mine)
                if store.check([f"{_DRAWN}/{theirs} in {mine}"]):
                    waiting.remove(other)
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks {', '.join(map(str, sorted(waiting)))} of {size} did not come")
        time.sleep(0.05)
    return PrefixStore(mine, store)


@contextmanager
def naming_lost_ranks(where: Callable[[], str], remedy: Callable[[], str]) -> Iterator[None]:
    """Report lost processes in one line.

    Raises:
        LostRanks: A collective failed because another process died, or did not answer in time.
    """
    try:
        yield
    except RuntimeError as error:
        why = str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0]
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        who = "another" if "closed" in why or "reset" in why else _silent()
        raise LostRanks(
            f"rank {dist.get_rank()} of {dist.get_world_size()} lost {who} {where()} ({why}): {remedy()}."
        ) from error


def _silent() -> str:
    """The ranks that do not sign in; "another" if the store is also lost."""
    assert dist.group.WORLD is not None
    store, size = dist.group.WORLD.get_group_store(), dist.get_world_size()
    deadline = time.monotonic() + _GRACE
    try:
        store.set(f"{_SIGNED}/{dist.get_rank()}", "")
        while silent := [rank for rank in range(size) if not store.check([f"{_SIGNED}/{rank}"])]:
            if time.monotonic() > deadline:
                return f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
            time.sleep(0.1)
    except dist.DistError:
        pass
    return "another"


MakeBatch = Callable[..., dict[str, Tensor]]


class Pieces:
    """The groups of ranks that share samples, and this rank's place among them.

    Args:
        timeout: How long to wait for the other ranks.

    Attributes:
        mesh: Dimensions "data", the groups, and "tokens", the ranks of one.
    """

    def __init__(self, size: int, *, device: str, timeout: timedelta):
        ranks = torch.arange(dist.get_world_size()).view(-1, size)
        groups: Any = [
            dist.new_subgroups_by_enumeration(each.tolist(), timeout=timeout)[0] for each in (ranks.T, ranks)
        ]
        self.mesh = DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=("data", "tokens"))

    @property
    def tokens(self) -> dist.ProcessGroup:
        """The ranks that share this one's samples."""
        return self.mesh.get_group("tokens")

    @property
    def with_main(self) -> bool:
        """Whether this rank shares the samples of the process that writes."""
        return self.mesh.get_local_rank("data") == 0

    def collate(self, collate: MakeBatch) -> MakeBatch:
        """Turn a function that makes a batch into one that makes this rank's piece of it."""
        return partial(_cut, collate, self.mesh.get_local_rank("tokens"), self.mesh["tokens"].size())

    def loader(self, loader: DataLoader, accelerator: Accelerator) -> DataLoader:
        """The batches of this rank's group."""
        return prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=self.mesh["data"].size(),
            process_index=self.mesh.get_local_rank("data"),
            put_on_device=True,
        )

    def gather(self, results: Any, accelerator: Accelerator) -> Any:
        """The results of all groups, one for each sample; those that pad the last batch are left out."""
        state = accelerator.gradient_state
        real = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

        def gathered(x: Tensor) -> Tensor:
            parts = [torch.empty_like(x) for _ in range(self.mesh["data"].size())]
            dist.all_gather(parts, x.contiguous(), group=self.mesh.get_group("data"))
            return torch.cat(parts)[:real]

        return recursively_apply(gathered, results)


def check_pieces(size: int, build: Callable[[], nn.Module], *, compile: bool = False) -> None:
    """Check that a model can be trained on pieces, before data are read.

    Args:
        size: Ranks of a group; 1 works for any model.

    Raises:
        ValueError: It cannot; the message says what does not work across ranks.
    """
    if size == 1:
        return
    if compile:
        raise ValueError(
            f"compile is on and context_parallel is {size}, but a graph does not exchange tokens: leave one out."
        )
    with torch.device("meta"):
        parallelize(build(), None)


def _cut(
    collate: MakeBatch, rank: int, size: int, samples: Sequence[Mapping[str, Any]], **options: Any
) -> dict[str, Tensor]:
    batch = collate(samples, **options)
    tokens = batch["input_ids"].shape
    return {
        name: x.tensor_split(size, dim=-1)[rank].contiguous() if x.shape == tokens else x for name, x in batch.items()
    }
