"""Rows of a table as tokens: learn to classify in context, and keep a large table as a few entries.

A small transformer sees labelled rows and rows without a label, and learns to label these from the others alone, on
table after table of made data, in which a few kinds of rows are common and most are rare. Asked about a table of 20,000
rows, all kinds alike, it attends to all of them, to as many as a budget allows, or to a context of that many entries
(`layer.context`), which is made once and asked in every batch.

    python examples/table_rows.py
    python examples/table_rows.py --rows 50000 --entries 512
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nystrom import MultiheadAttention

COLUMNS, CLASSES, KINDS, WIDTH = 4, 3, 40, 64


class RowAttention(nn.Module):
    """A row without a label asks the labelled rows, and thinks."""

    def __init__(self, entries: int):
        super().__init__()
        sizes = {"num_heavy": entries // 4, "num_clusters": entries - entries // 4}
        self.attention = MultiheadAttention(WIDTH, 4, method="near_far", self_attention=False, **sizes)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, asked: Tensor, attend: Callable[[MultiheadAttention, Tensor], Tensor]) -> Tensor:
        """One step of thought; `attend` gives what the rows answer."""
        asked = asked + attend(self.attention, self.norms[0](asked))
        return asked + self.mlp(self.norms[1](asked))


class Classifier(nn.Module):
    """Labels rows from other rows that have labels."""

    def __init__(self, entries: int, layers: int = 2):
        super().__init__()
        self.columns = nn.Sequential(nn.Linear(COLUMNS, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.labels = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(RowAttention(entries) for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def rows(self, table: Tensor, labels: Tensor) -> Tensor:
        """Labelled rows as tokens."""
        return self.columns(table) + self.labels(labels)

    def forward(self, asked: Tensor, *attends: Callable[[MultiheadAttention, Tensor], Tensor]) -> Tensor:
        """Scores of the classes; what each layer attends to comes one by one."""
        x = self.columns(asked)
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, attend)
        return self.head(x)


def among(rows: Tensor) -> Callable[[MultiheadAttention, Tensor], Tensor]:
    """Attend to rows as they are."""
    return lambda attention, x: attention(x, rows, rows)[0]


def draw(tables: int, rows: int, questions: int) -> tuple[Tensor, Tensor]:
    """Rows of kinds, each with place and class: kind i is 1 / i^2 as common as the first, except in the questions."""
    places, classes = torch.randn(tables, KINDS, COLUMNS), torch.randint(CLASSES, (tables, KINDS))
    common = torch.arange(1, KINDS + 1).float().pow(-2).expand(tables, -1)
    kinds = torch.cat([common.multinomial(rows, replacement=True), torch.randint(KINDS, (tables, questions))], dim=1)
    table = places.gather(1, kinds[..., None].expand(-1, -1, COLUMNS))
    return table + 0.1 * torch.randn_like(table), classes.gather(1, kinds)


def train(model: Classifier, steps: int, rows: int) -> None:
    """Steps of AdamW, each on 16 new tables; few rows are exact attention."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        table, labels = draw(16, rows, 64)
        seen = among(model.rows(table[:, :rows], labels[:, :rows]))
        scores = model(table[:, rows:], *[seen] * len(model.layers))
        nn.functional.cross_entropy(scores.flatten(0, 1), labels[:, rows:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def ask(name: str, model: Classifier, asked: Tensor, labels: Tensor, make: Callable[[], list]) -> None:
    """Print the accuracy over all batches of questions, and the time of them all, what they attend to included."""
    start = time.perf_counter()
    attends = make()
    scores = torch.cat([model(batch, *attends) for batch in asked.split(16, dim=1)], dim=1)
    seconds = time.perf_counter() - start
    print(f"{name}: accuracy {(scores.argmax(dim=-1) == labels).float().mean():.1%}, {seconds:.2f} s")


def main() -> None:
    """Train, and ask about a large table in three ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, help="of the table")
    parser.add_argument("--entries", type=int, default=256, help="that stand for them")
    parser.add_argument("--questions", type=int, default=1_600)
    parser.add_argument("--steps", type=int, default=800)
    args = parser.parse_args()
    if args.entries < 16 or args.rows < args.entries or args.steps < 1 or args.questions < 1:
        parser.error(f"expected at least 16 entries, as many rows, a step and a question; came {vars(args)}")
    torch.manual_seed(0)
    model = Classifier(args.entries)
    train(model, args.steps, rows=args.entries // 4 * 3)

    table, labels = draw(1, args.rows, args.questions)
    asked, wanted = table[:, args.rows :], labels[:, args.rows :]
    rows = model.eval().rows(table[:, : args.rows], labels[:, : args.rows]).detach()
    exact = Classifier(args.entries).eval()
    for layer in exact.layers:
        layer.attention = MultiheadAttention(WIDTH, 4, method="softmax", self_attention=False)
    exact.load_state_dict(model.state_dict())
    count = len(model.layers)
    few = rows[:, torch.linspace(0, args.rows - 1, args.entries).long()]
    ask(f"all {args.rows} rows", exact, asked, wanted, lambda: [among(rows)] * count)
    ask(f"{args.entries} of the rows", exact, asked, wanted, lambda: [among(few)] * count)

    def contexts() -> list:
        made = [layer.attention.context(rows) for layer in model.layers]
        return [lambda _, x, context=context: context(x) for context in made]

    ask(f"a context of {args.entries} entries", model, asked, wanted, contexts)


if __name__ == "__main__":
    main()
