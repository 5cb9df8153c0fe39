"""Training with samples split across processes (context parallelism): each holds a piece of their tokens.

The W processes form a mesh ("data", "tokens") of W / N groups of N neighbours. The ranks of a group load the same
samples, pad them, and each keeps its piece of the tokens; pieces differ by one token at most. The model is one of
`nystrom.parallel.parallelize`, so that every rank has the whole loss of its group, and the mean of the gradients over
all W ranks, as DistributedDataParallel takes it, is the gradient of the batch. Scores are gathered from one rank of
each group.

Each rank applies dropout to its own tokens, with its own generator. After the pooling, where the ranks of a group hold
the same values, a step averages over their draws.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from nystrom.parallel import parallelize

MakeBatch = Callable[..., dict[str, Tensor]]


class Pieces:
    """The groups of ranks that share samples, and this rank's place among them.

    Args:
        size: Ranks of a group.
        device: "cpu" or "cuda".
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
        build: Makes the model, without weights.
        compile: Whether it is compiled.

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
