"""Train a small transformer from scratch in plain PyTorch, with attention of this library; safetensors saves it.

The task: two bits are hidden among hundreds of digits, at any places. The model reads all and says both at its first
token. Only attention brings what stands far away to the first token: without it one answer in four is right.

    pip install ./packages/nystrom safetensors
    python examples/train_from_scratch.py                          # about a minute on one core
    python examples/train_from_scratch.py --method near_far --length 4096 --device cuda
"""

import argparse
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from nystrom import MultiheadAttention

# Tokens: the ten digits, the first token of each sequence, the first bit (0 or 1), the second, and padding.
DIGITS, FIRST, BITS, PADDING, TOKENS = 10, 10, (11, 13), 15, 16


def draw_batch(size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences of different lengths, which of their tokens are padding, and the two bits as a number below four."""
    tokens = torch.randint(DIGITS, (size, length), generator=generator)
    tokens[:, 0] = FIRST
    lengths = torch.randint(length // 2, length + 1, (size, 1), generator=generator)
    bits = torch.randint(2, (size, 2), generator=generator)
    # Two different places among the real tokens after the first.
    places = (
        1
        + torch.rand(size, length - 1, generator=generator)
        .masked_fill(torch.arange(1, length) >= lengths, -1.0)
        .topk(2)
        .indices
    )
    tokens.scatter_(1, places, bits + torch.tensor(BITS))
    padding = torch.arange(length) >= lengths
    return tokens.masked_fill(padding, PADDING), padding, 2 * bits[:, 0] + bits[:, 1]


class Block(nn.Module):
    """Attention and a feed-forward network, each added to what it reads, which is normalised before."""

    def __init__(self, width: int, heads: int, method: str, options: dict[str, int]):
        super().__init__()
        self.attention = MultiheadAttention(width, heads, method=method, **options)
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """States (batch, tokens, width), and which tokens are padding."""
        # One argument is self-attention; what padding holds changes nothing, so its states need no care.
        x = x + self.attention(self.before_attention(x), key_padding_mask=padding)[0]
        return x + self.network(self.before_network(x))


class Model(nn.Module):
    """An encoder that answers at its first token."""

    def __init__(self, length: int, width: int, depth: int, heads: int, method: str, options: dict[str, int]):
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, method, options) for _ in range(depth))
        self.answer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4))
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02 if embedding is self.places else 1.0)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        """Scores (batch, 4) of the four answers."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, padding)
        return self.answer(x[:, 0])


def accuracy(model: Model, batches: list[tuple[Tensor, Tensor, Tensor]]) -> float:
    """Share of right answers."""
    model.eval()
    with torch.no_grad():
        right = [(model(tokens, padding).argmax(dim=1) == label).float() for tokens, padding, label in batches]
    model.train()
    return torch.cat(right).mean().item()


def main() -> None:
    """Draw, train, evaluate, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="nystrom", help="nystrom, near_far, softmax, performer, ...")
    parser.add_argument("--options", nargs="*", default=[], help="of the method, such as num_landmarks=32")
    parser.add_argument("--length", type=int, default=256, help="the longest sequence")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2, help="blocks")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="the largest; it rises, then falls to zero")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path, help="file for the weights, .safetensors; not saved if not given")
    asked = parser.parse_args()

    torch.manual_seed(asked.seed)
    options = {name: int(value) for name, value in (option.split("=") for option in asked.options)}
    model = Model(asked.length, asked.width, asked.depth, 4, asked.method, options).to(asked.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=asked.learning_rate, weight_decay=0.01)
    warm_up = max(1, asked.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (step + 1) / warm_up if step < warm_up else 0.5 + 0.5 * math.cos(math.pi * step / asked.steps),
    )
    draws, held_out = torch.Generator().manual_seed(asked.seed), torch.Generator().manual_seed(asked.seed + 1)

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        tokens, padding, label = draw_batch(asked.batch_size, asked.length, generator)
        return tokens.to(asked.device), padding.to(asked.device), label.to(asked.device)

    test = [batch(held_out) for _ in range(8)]
    weights = sum(weight.numel() for weight in model.parameters())
    print(f"{asked.method} attention, {weights:,} weights, up to {asked.length} tokens, on {asked.device}")
    start = time.perf_counter()
    for step in range(1, asked.steps + 1):
        tokens, padding, label = batch(draws)
        loss = F.cross_entropy(model(tokens, padding), label)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, asked.steps // 10) == 0:
            taken = time.perf_counter() - start
            right = accuracy(model, test)
            print(f"step {step}: loss {loss.item():.3f}, accuracy on other sequences {right:.1%}, {taken:.0f} s")
    if asked.to is not None:
        save_file(model.state_dict(), asked.to)
        print(f"weights: {asked.to}")


if __name__ == "__main__":
    main()
