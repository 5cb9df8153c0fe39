"""Make a task whose answer no 512 tokens hold: joined film reviews, of which most are positive or negative.

A document is 13 reviews of IMDB, about 4,000 tokens, each taken once. Three in four of its reviews are positive in one
half of the documents, one in four in the other half. The label, pos or neg, is that of most of its reviews. Writes
train.jsonl, dev.jsonl and test.jsonl for `nystrom finetune`, and texts.txt, documents without labels, for `nystrom
inspect`. With --reviews 1 the documents are single reviews.

    pip install ./packages/nystrom ./packages/nystrom-lab
    python examples/join_reviews.py --data aclImdb --to joined
    python examples/join_reviews.py --data aclImdb --to single --reviews 1 --documents 1600 200 300

The data are those of https://ai.stanford.edu/~amaas/data/sentiment/, unpacked or not, or files named train and test.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from nystrom_lab.data.language.labelled.glue import find_labelled
from nystrom_lab.data.language.labelled.splits import TextSplit, read_labelled

AGREE = 3 / 4
FILES = {"train": "train", "validation": "dev", "test": "test"}


class Document(NamedTuple):
    """Joined reviews, and whether each is positive."""

    text: str
    votes: list[bool]

    def positive(self, first: int | None = None) -> float:
        """1 if most of the first reviews, or of all, are positive, 0 if most are negative, and 1/2 if they tie."""
        votes = self.votes[:first]
        return (1 + (2 * sum(votes) > len(votes)) - (2 * sum(votes) < len(votes))) / 2


def documents(split: TextSplit, reviews: int, seed: int) -> Iterator[Document]:
    """Join reviews, mostly positive and mostly negative ones in turn, until one kind runs out."""
    draw = random.Random(seed)
    assert split.labels is not None
    piles = [[text for text, label in zip(split.texts, split.labels, strict=True) if label == kind] for kind in (0, 1)]
    for pile in piles:
        draw.shuffle(pile)
    positive = True
    while True:
        votes = [(draw.random() < AGREE) == positive for _ in range(reviews)]
        if any(votes.count(kind) > len(piles[kind]) for kind in (False, True)):
            return
        texts = (" ".join(piles[vote].pop().replace("<br />", " ").split()) for vote in votes)
        yield Document(" ".join(texts), votes)
        positive = not positive


def main() -> None:
    """Write the files, and what the first reviews of a document tell of its label."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the reviews: aclImdb, or a folder of files")
    parser.add_argument("--to", type=Path, required=True, help="folder to write, which must be new or empty")
    parser.add_argument("--reviews", type=int, default=13, help="reviews of a document, an odd number")
    parser.add_argument("--documents", type=int, nargs=3, default=(800, 100, 300), metavar=("TRAIN", "DEV", "TEST"))
    args = parser.parse_args()
    if args.reviews < 1 or args.reviews % 2 == 0:
        raise ValueError(f"--reviews is {args.reviews}: take an odd number, so that most of them agree.")
    if min(args.documents) < 1:
        raise ValueError(f"--documents is {' '.join(map(str, args.documents))}: each split needs one at least.")
    if args.to.exists() and any(args.to.iterdir()):
        raise ValueError(f"{args.to} is not empty: name a new folder.")
    splits = read_labelled([args.data], find_labelled("imdb")).splits
    made: dict[str, list[Document]] = {}
    for (name, file), wanted in zip(FILES.items(), args.documents, strict=True):
        if name not in splits:
            raise ValueError(f"{args.data} has no {name} split with labels.")
        made[file] = list(islice(documents(splits[name], args.reviews, seed=0), wanted))
        if len(made[file]) < wanted:
            raise ValueError(f"{args.data} has reviews for {len(made[file])} documents of {name}, not {wanted}.")
    args.to.mkdir(parents=True, exist_ok=True)
    for file, found in made.items():
        with (args.to / f"{file}.jsonl").open("w", encoding="utf-8") as stream:
            for each in found:
                label = "pos" if each.positive() else "neg"
                stream.write(json.dumps({"text": each.text, "label": label}) + "\n")
    (args.to / "texts.txt").write_text("".join(f"{each.text}\n" for each in made["dev"]), encoding="utf-8")
    for first in range(1, min(4, args.reviews)):
        right = [1 - abs(each.positive(first) - each.positive()) for each in made["test"]]
        print(f"The first {first} of {args.reviews} reviews agree with the label: {sum(right) / len(right):.1%}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, NotADirectoryError) as error:
        sys.exit(str(error))
