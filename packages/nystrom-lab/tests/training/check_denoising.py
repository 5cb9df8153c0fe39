"""The loss of corrupted tokens over ranks beside that of one process; run by `ranks.py`."""

import functools

import torch
import torch.distributed as dist

from nystrom.models import EncoderConfig
from nystrom_lab.training.denoising import Denoiser

# float64 rounding of sums in another order.
CLOSE = {"rtol": 1e-7, "atol": 1e-9}


def checks():
    for masked in (False, True):
        check = functools.partial(the_mean_of_the_ranks_losses_of_corrupted_tokens_is_that_of_one_process, masked)
        yield f"denoising {'masked' if masked else 'open'}", check


def the_mean_of_the_ranks_losses_of_corrupted_tokens_is_that_of_one_process(masked):
    config = EncoderConfig(vocab_size=30, hidden_size=16, num_attention_heads=2)
    source = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    denoiser = Denoiser(config).double()
    ids = torch.randint(30, (2, 23), generator=source)
    x = torch.randn(2, 23, config.hidden_size, dtype=torch.float64, generator=source)
    keep = torch.arange(23) < torch.tensor([[5], [21]]) if masked else None
    expected = denoiser.loss(x, ids, keep)
    mine = [None if y is None else y.split((7, 16), 1)[dist.get_rank()] for y in (x, ids, keep)]
    out = denoiser.loss(*mine, group=dist.group.WORLD).detach()
    dist.all_reduce(out)
    torch.testing.assert_close(out / dist.get_world_size(), expected.detach(), **CLOSE)
