"""The five tasks of the Long Range Arena, their published sizes and files; needs the standard library only.

Source: Tay et al. (2021), arXiv:2011.04006, and the data sets it publishes. Text and Retrieval are cut at 4,000 bytes,
as the two papers' tables say. The shares that are masked are those of Amos et al. (2023), arXiv:2310.02980.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """Facts about a task that hold however it is generated, read or trained on.

    Attributes:
        vocab_size: Tokens.
        num_labels: Classes of the published data; a user's own texts may have others.
        pad_token_id: The token that no sample contains; None if every token is real.
        train: Published samples for training.
        val: Published samples for validation.
        test: Published samples for the test.
        min_length: Every sample has more tokens than this.
        max_length: No sample, or document of one, has more tokens than this.
        documents: Sequences of a sample.
        is_cut: Whether samples that are too long are truncated during preparation.
        any_size: Whether data come in larger sizes, for which the model gets more positions.
        mask_share: Share of the tokens to mask when an encoder is pretrained on the inputs.
    """

    vocab_size: int
    num_labels: int
    pad_token_id: int | None
    train: int
    val: int
    test: int
    min_length: int = 0
    max_length: int
    documents: int = 1
    is_cut: bool = False
    any_size: bool = False
    mask_share: float


LRA: dict[str, TaskFacts] = {
    "listops": TaskFacts(
        vocab_size=17,
        num_labels=10,
        pad_token_id=0,
        train=96_000,
        val=2_000,
        test=2_000,
        min_length=500,
        max_length=2_000,
        mask_share=0.1,
    ),
    "text": TaskFacts(
        vocab_size=257,
        num_labels=2,
        pad_token_id=0,
        train=25_000,
        val=25_000,
        test=25_000,
        max_length=4_000,
        is_cut=True,
        mask_share=0.15,
    ),
    "retrieval": TaskFacts(
        vocab_size=257,
        num_labels=2,
        pad_token_id=0,
        train=147_086,
        val=18_090,
        test=17_437,
        max_length=4_000,
        documents=2,
        is_cut=True,
        mask_share=0.15,
    ),
    "image": TaskFacts(
        vocab_size=256,
        num_labels=10,
        pad_token_id=None,
        train=45_000,
        val=5_000,
        test=10_000,
        max_length=1_024,
        mask_share=0.5,
    ),
    "pathfinder": TaskFacts(
        vocab_size=256,
        num_labels=2,
        pad_token_id=None,
        train=160_000,
        val=20_000,
        test=20_000,
        max_length=1_024,
        any_size=True,
        mask_share=0.5,
    ),
}


AROUND = ("", "lra_release", "lra_release/lra_release")


def published_files(
    source: Path, names: Mapping[str, str], *, folder: str, endings: Sequence[str] = ("",)
) -> dict[str, Path]:
    """Find the file of each split in a folder or in the release around it; empty if there is none of them.

    `folder` is theirs in the release, and `endings` may stand behind a name, such as that of a compressed file.

    Raises:
        ValueError: Some are missing, or the source is one of them.
    """
    if source.is_file() and source.name in names.values():
        raise ValueError(f"{source} is one of three official files: name their folder, {source.parent}.")
    for place in (source, *(source / around / folder for around in AROUND)):
        files = {
            split: path
            for split, name in names.items()
            for path in (place / (name + ending) for ending in endings)
            if path.is_file()
        }
        if missing := [name for split, name in names.items() if files and split not in files]:
            raise ValueError(f"{place} lacks {', '.join(missing)}: all three official files are needed.")
        if files:
            return files
    return {}
