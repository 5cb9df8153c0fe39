"""A time series of 10,000 steps: learn what hangs on two places far apart, and see what a step costs.

Each series is noise with a burst in its first and one in its second half, and the question is whether both swing alike.
A model of two layers with Nyström attention learns it on short series, patches of 16 steps a token, and reads long
ones. Then a layer with it and one with exact attention take a token a step: time and memory of a training step.

    python examples/long_series.py
    python examples/long_series.py --steps 40000
"""

import argparse
import statistics

import torch
from torch import Tensor, nn

from nystrom import MultiheadAttention
from nystrom.clock import seconds
from nystrom_lab.measure.peak import peak_bytes

PATCH, WIDTH = 16, 64


class SeriesClassifier(nn.Module):
    """Patches of a series as tokens, two layers, and the mean of the tokens."""

    def __init__(self, method: str):
        super().__init__()
        self.patches = nn.Sequential(nn.Linear(PATCH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        options = {"num_landmarks": 64} if method == "nystrom" else {}
        self.layers = nn.ModuleList(MultiheadAttention(WIDTH, 4, method=method, **options) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, series: Tensor) -> Tensor:
        """One score a series (batch, steps)."""
        x = self.patches(series.unflatten(1, (-1, PATCH)))
        for i, (layer, mlp) in enumerate(zip(self.layers, self.mlps, strict=True)):
            x = x + layer(self.norms[2 * i](x))[0]
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(x.amax(dim=1))[:, 0]


def draw(count: int, steps: int) -> tuple[Tensor, Tensor]:
    """Series with two bursts of 64 steps, at one of four frequencies each; and whether these are the same."""
    series, alike = 0.1 * torch.randn(count, steps), torch.rand(count) < 0.5
    first = torch.randint(4, (count,))
    second = torch.where(alike, first, (first + torch.randint(1, 4, (count,))) % 4)
    time = torch.arange(64) / 64
    for half, kind in enumerate((first, second)):
        burst = torch.sin(2 * torch.pi * (4 * kind[:, None] + 4) * time + 6.28 * torch.rand(count, 1))
        start = half * (steps // 2) + torch.randint(steps // 2 - 64, (count, 1))
        series = series.scatter_add(1, start + torch.arange(64), burst)
    return series, alike.float()


def main() -> None:
    """Train on short series, and measure a step of long ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="of a long series")
    parser.add_argument("--train", type=int, default=400, help="training steps")
    args = parser.parse_args()
    if args.steps < 512 or args.steps % PATCH or args.train < 1:
        parser.error(f"expected at least 512 steps, a multiple of {PATCH}, and a training step; came {vars(args)}")
    torch.manual_seed(0)
    model = SeriesClassifier("nystrom")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(args.train):
        series, alike = draw(32, 512)
        nn.functional.binary_cross_entropy_with_logits(model(series), alike).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for steps in (512, args.steps):
            series, alike = draw(256 if steps == 512 else 64, steps)
            right = torch.cat([(model(part) > 0) for part in series.split(16)]) == (alike > 0)
            print(f"accuracy on series of {steps} steps: {right.double().mean():.1%}")

    # Every step counts here: one token a step.
    x = torch.randn(1, args.steps, WIDTH)
    for method in ("nystrom", "softmax"):
        layer = MultiheadAttention(WIDTH, 4, method=method)

        def step(layer: nn.Module = layer) -> None:
            layer(x)[0].sum().backward()

        step()
        took = statistics.median(seconds(step, torch.device("cpu")) for _ in range(3))
        memory = peak_bytes(step, torch.device("cpu")) / 1e6
        print(
            f"{method}: a layer over {args.steps} tokens takes {1e3 * took:.0f} ms and {memory:.0f} MB a training step"
        )


if __name__ == "__main__":
    main()
