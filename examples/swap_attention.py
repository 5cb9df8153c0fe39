"""Train a plain PyTorch transformer, put Nyström attention in its place, compare, and train on.

Each series of made data is noise with a short burst somewhere, whose frequency is its class. An `nn.TransformerEncoder`
learns to tell them with exact attention; `nystrom.replace_attention` then exchanges the attention of its layers, with
the weights as they are.

    python examples/swap_attention.py
    python examples/swap_attention.py --method near_far --tokens 4096 --steps 200
"""

import argparse
import copy
import math
import sys
import time

import torch
from torch import Tensor, nn

from nystrom import replace_attention

CLASSES, SAMPLES_PER_TOKEN, WIDTH = 4, 8, 64


def draw(count: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Noise with a burst over a sixteenth of it, and the burst's class."""
    labels = torch.randint(CLASSES, (count, 1))
    places = torch.arange(tokens * SAMPLES_PER_TOKEN)
    start = torch.rand(count, 1) * len(places) * 15 / 16
    burst = (places >= start) & (places < start + len(places) / 16)
    wave = torch.sin(2 * math.pi * 0.05 * (1 + labels) * places)
    return (torch.randn(count, len(places)) + 3 * burst * wave).view(count, tokens, -1), labels[:, 0]


def train(model: nn.Module, steps: int, tokens: int) -> None:
    """Take steps with AdamW, each on new series."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=2e-3)
    for _ in range(steps):
        series, labels = draw(16, tokens)
        nn.functional.cross_entropy(model(series).mean(dim=1), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def evaluate(name: str, model: nn.Module, series: Tensor, labels: Tensor) -> Tensor:
    """Print accuracy and time; returns the scores of all tokens, whose mean chooses the class."""
    model.eval()(series[:1])
    start = time.perf_counter()
    scores = model(series)
    seconds = time.perf_counter() - start
    accuracy = (scores.mean(dim=1).argmax(dim=1) == labels).float().mean()
    print(f"{name}: accuracy {accuracy:.1%}, {1e3 * seconds:.0f} ms for {len(series)} series")
    return scores


def main() -> None:
    """Train, exchange, compare, train on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="nystrom", help="any name of `nystrom methods` but linformer")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    if args.tokens < 16 or args.steps < 4:
        parser.error(f"--tokens {args.tokens} --steps {args.steps}: expected at least 16 and 4")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=128, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Linear(SAMPLES_PER_TOKEN, WIDTH), encoder, nn.Linear(WIDTH, CLASSES))
    swapped = copy.deepcopy(model)
    layers = replace_attention(swapped, args.method)  # refuses a wrong name before anything is trained

    series, labels = draw(64, args.tokens)
    train(model, args.steps, args.tokens)
    exact = evaluate("exact attention", model, series, labels)
    swapped.load_state_dict(model.state_dict(), strict=False)  # performer has features of its own
    came = evaluate(f"{args.method} in {len(layers)} layers", swapped, series, labels)
    print(f"relative error of the scores: {(came - exact).norm() / exact.norm():.3f}")
    train(swapped, args.steps // 4, args.tokens)
    evaluate(f"{args.method} after {args.steps // 4} more steps", swapped, series, labels)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(str(error))
