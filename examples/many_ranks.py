"""A training step of an encoder whose tokens are cut over the ranks of a group, beside the same step in one process.

Each rank holds a piece of every sequence. The loss and the new weights are those of one process, to rounding, while
what the ranks exchange in attention grows with the landmarks and not with the tokens.

    torchrun --nproc-per-node 2 examples/many_ranks.py
    torchrun --nproc-per-node 4 examples/many_ranks.py --tokens 16384 --attention near_far
"""

import argparse
import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nystrom.models import EncoderConfig, EncoderForSequenceClassification
from nystrom.parallel import count_bytes, parallelize

BATCH, VOCABULARY = 2, 1000


def step(model: nn.Module, ids: Tensor, labels: Tensor) -> float:
    """One step of gradient descent, the gradients averaged over the ranks that hold pieces; returns the loss."""
    loss = model(ids, labels=labels).loss
    loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.grad is not None:
                if model.group is not None:
                    dist.all_reduce(weight.grad, op=dist.ReduceOp.SUM)
                    weight.grad /= dist.get_world_size()
                weight -= 0.1 * weight.grad
    return loss.item()


def main() -> None:
    """Take the step over all ranks, then in the first process alone, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of each sequence, over all ranks")
    parser.add_argument("--attention", default="nystrom", help="a method that works over ranks")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("There are no ranks: run it by torchrun --nproc-per-node 2 examples/many_ranks.py")
    if args.tokens < (world := int(os.environ["WORLD_SIZE"])):
        sys.exit(f"--tokens is {args.tokens}, fewer than the {world} ranks: give each at least one.")
    torch.manual_seed(0)  # the same weights and inputs on all ranks
    config = EncoderConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=args.tokens, hidden_dropout_prob=0.0, attention=args.attention, conv_kernel_size=None,
    )  # fmt: skip
    model = EncoderForSequenceClassification(config).train()
    alone = copy.deepcopy(model)
    ids, labels = torch.randint(1, VOCABULARY, (BATCH, args.tokens)), torch.arange(BATCH)

    dist.init_process_group("gloo")
    try:
        mine = ids.tensor_split(world, dim=1)[dist.get_rank()]
        parallelize(model, dist.group.WORLD)
        with count_bytes() as sent:
            loss = step(model, mine, labels)
        if dist.get_rank() == 0:
            loss_alone = step(alone, ids, labels)
            pairs = zip(model.parameters(), alone.parameters(), strict=True)
            apart = max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)
            print(f"loss over {world} ranks {loss:.6f}, in one process {loss_alone:.6f}")
            print(f"largest difference of a weight after the step: {apart:.1e}")
            print(f"sent by the first rank, gradients of weights aside: {sent.total:,} bytes")
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(str(error))
