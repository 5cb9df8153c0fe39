"""One labelled file has one answer, whichever command reads it: fine-tuning, training on bytes, its preparation, or
healing.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from nystrom_lab.data.language.labelled.glue import own_task
from nystrom_lab.data.language.labelled.splits import read_labelled
from nystrom_lab.data.lra.texts.own_texts import prepare_own
from nystrom_lab.data.lra.texts.reviews import prepare_text
from nystrom_lab.data.sources.corpora import find_corpora

TAKEN = ""


def labelled(columns: str = "text,label", labels: Sequence[str] = ("0", "1"), rows: int = 60, empty: int = -1) -> str:
    draw = random.Random(1)
    lines = [columns]
    for i in range(rows):
        words = " ".join(draw.choices(["good", "bad", "film", "plot", "slow", "fine"], k=9))
        # Each label comes.
        label = labels[i] if i < len(labels) else draw.choice(labels)
        lines.append(f"{'' if i == empty else f'{words} {i}'},{label}")
    return "\n".join(lines) + "\n"


# The content of each file, and what is wanted: taken, or a part of the message. Healing reads no labels.
FILES = {
    "columns text,label": (labelled(), TAKEN, TAKEN),
    "columns sentence,label": (labelled("sentence,label"), TAKEN, TAKEN),
    "columns review,sentiment": (labelled("review,sentiment"), TAKEN, TAKEN),
    "columns body,label": (labelled("body,label"), "there is no 'text'", "there is no 'text'"),
    "columns Source,Target": (labelled("Source,Target"), TAKEN, TAKEN),
    "columns content,label": (labelled("content,label"), TAKEN, TAKEN),
    "columns document,label": (labelled("document,label"), "there is no 'text'", "there is no 'text'"),
    "columns text,class": (labelled("text,class"), TAKEN, TAKEN),
    "labels 1 and 1.0": (labelled(labels=("1", "1.0", "0")), "'1', '1.0' are equal numbers", TAKEN),
    "labels 1 and one": (labelled(labels=("1", "one")), TAKEN, TAKEN),
    # Numbers to predict for fine-tuning; training on bytes learns classes alone.
    "labels that are no whole numbers": (labelled(labels=("0.5", "1.5", "2")), TAKEN, TAKEN),
    "an empty text": (labelled(empty=3), "line 5: a text is empty", TAKEN),
    "300 classes": (labelled(labels=[f"c{i}" for i in range(300)], rows=900), TAKEN, TAKEN),
    "one class": (labelled(labels=("1",)), "the only label is '1'", TAKEN),
    "labels that say there is none": (labelled(labels=("0", "1", "-")), "'-'", TAKEN),
}


def answer(command: str, file: Path) -> str:
    """The message of a command about a file; "" where it takes it."""
    try:
        if command == "finetune":
            read_labelled([file], own_task(), own=True)
        elif command == "train":
            prepare_own("text", file, under=file.parent / "prepared")
        elif command == "prepare":
            prepare_text(file, file.parent / "prepared")
        else:
            list(find_corpora([file])[0])
    except ValueError as error:
        return str(error)
    return TAKEN


def cases():
    for name, (content, of_labels, of_texts) in FILES.items():
        for command in ("finetune", "train", "prepare", "heal"):
            wanted = of_texts if command == "heal" else of_labels
            if name == "labels that are no whole numbers" and command in ("train", "prepare"):
                wanted = "are numbers"
            yield pytest.param(command, content, wanted, id=f"{name}-{command}")


@pytest.mark.parametrize(("command", "content", "wanted"), [*cases()])
def test_a_labelled_file_has_one_answer(command, content, wanted, tmp_path):
    file = tmp_path / "texts.csv"
    file.write_text(content)
    said = answer(command, file)
    assert wanted in said if wanted else not said, said
