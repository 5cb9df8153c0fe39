"""Pathology slides as bags of tiles: classify a slide, and show where the class token looks.

Slides are made here: a grid of tiles, each with 1,024 features, of which a patch of up to nine carries a signal in
every second slide. A class token and the tiles, in the order of a Hilbert curve, go through a layer of near_far, whose
rows of weights are a distribution: the row of the class token, put back on the grid, is the heat map. Padded batches
train; the heat map is of one slide.

    python examples/slide_heat_map.py
    python examples/slide_heat_map.py --side 40 --figure map.png
"""

import argparse

import torch
from torch import Tensor, nn

from nystrom import MultiheadAttention, heat_map, hilbert_order

FEATURES, WIDTH, PIXELS = 1024, 64, 256
SIGNAL = torch.randn(FEATURES, generator=torch.Generator().manual_seed(1))


class SlideClassifier(nn.Module):
    """Reads a bag of tiles, with a class token in front."""

    def __init__(self):
        super().__init__()
        self.tiles = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU())
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = MultiheadAttention(WIDTH, 1, method="near_far")
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, tiles: Tensor, padding: Tensor | None = None, *, weights: bool = False) -> tuple[Tensor, Tensor]:
        """The score of each slide; with `weights` also the row of the class token over the tiles."""
        x = torch.cat([self.token.expand(len(tiles), -1, -1), self.tiles(tiles)], dim=1)
        if padding is not None:
            padding = nn.functional.pad(padding, (1, 0))
        asked = torch.tensor([0]) if weights else None
        out, rows = self.attention(self.norm(x), key_padding_mask=padding, weight_queries=asked, need_weights=weights)
        return self.head(out[:, 0])[:, 0], out if rows is None else rows[:, 0, 1:]


def draw(side: int, positive: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Tiles of a slide of about two thirds of a grid, where they are in pixels, and which carry the signal."""
    place = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    place = place[torch.rand(len(place)) < 0.67]
    middle = place[torch.randint(len(place), (1,))]
    near = (place - middle).abs().amax(dim=1) <= 1
    signal = near if positive else torch.zeros(len(place), dtype=torch.bool)
    tiles = torch.randn(len(place), FEATURES) + 0.4 * signal[:, None] * SIGNAL
    # So that neighbours of the plane are near in the sequence, which near_far sees exactly.
    order = hilbert_order(place)
    return tiles[order], PIXELS * place[order], signal[order]


def batch(count: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slides of different sizes, padded, every second one positive."""
    bags = [draw(side, positive=bool(i % 2))[0] for i in range(count)]
    lengths = torch.tensor([len(bag) for bag in bags])
    tiles = nn.utils.rnn.pad_sequence(bags, batch_first=True)
    return tiles, torch.arange(tiles.shape[1]) >= lengths[:, None], torch.arange(count).remainder(2).float()


def main() -> None:
    """Train, score other slides, and draw the heat map of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=16, help="tiles of a side of the grid")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--figure", help="file for the heat map, such as map.png; needs matplotlib")
    args = parser.parse_args()
    if args.side < 3 or args.steps < 1:
        parser.error(f"expected a side of at least 3 tiles and a step; came {args.side} and {args.steps}")
    torch.manual_seed(0)
    model = SlideClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(args.steps):
        tiles, padding, labels = batch(8, args.side)
        loss = nn.functional.binary_cross_entropy_with_logits(model(tiles, padding)[0], labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        tiles, padding, labels = batch(64, args.side)
        right = (model(tiles, padding)[0] > 0) == (labels > 0)
        print(f"accuracy on other slides {right.double().mean():.1%}")
        tiles, place, signal = draw(args.side, positive=True)
        score, row = model(tiles[None], weights=True)
    print(f"a positive slide of {len(tiles)} tiles: score {score.item():.2f}, its largest weight {row.max():.3f}")
    share = row[0, signal].sum() / row.sum()
    print(f"of the class token's attention to tiles {share:.1%} is on the {int(signal.sum())} that carry the signal")
    if args.figure:
        import matplotlib.pyplot as plt

        plt.imshow(heat_map(row[0], place, tile=PIXELS))
        plt.savefig(args.figure)
        print(args.figure)


if __name__ == "__main__":
    main()
