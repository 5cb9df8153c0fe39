"""ListOps of the Long Range Arena: generate the data set or read the published one, and open it.

A sample is a nested expression of 500 to 2,000 tokens over MIN, MAX, MED and SM, its class the digit it evaluates to.
`expressions` draws them, `store.token_files` keeps them on disk, and `tsv` reads and writes the official tsv files.

The draw depends on the seed alone. Attempts come in chunks of a size that only `max_length` decides, chunk i from the
i-th child of `numpy.random.SeedSequence(seed)`; chunks are joined in order, and repeated expressions are dropped over
all splits together. The first samples make the test split, the next the validation split, the rest the training split,
so more training data leave the other two as they were.

Source: Tay et al. (2021), arXiv:2011.04006.
Departs from the authors' code: the draw has a seed.
"""

import hashlib
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nystrom.checks import check_at_least
from nystrom.progress import Progress
from nystrom_lab.data.lra.listops.expressions import PUBLISHED_COUNTS, TASK, VOCABULARY, Limits, draw_expressions
from nystrom_lab.data.store.prepared_folder import holds, new_folder
from nystrom_lab.data.store.split import Split
from nystrom_lab.data.store.token_files import TokenSamples, damaged, gather, write_split
from nystrom_lab.measure.rows import cores

PUBLISHED_SETTINGS = {split: PUBLISHED_COUNTS[split] for split in ("test", "val", "train")} | {"seed": 0}
PUBLISHED_SETTINGS |= {"min_length": 500, "max_length": 2_000, "max_depth": 10, "max_args": 10}


def prepare_listops(
    to: Path,
    *,
    source: Path | None = None,
    train: int | None = None,
    val: int | None = None,
    test: int | None = None,
    seed: int | None = None,
    min_length: int | None = None,
    max_length: int | None = None,
    max_depth: int | None = None,
    max_args: int | None = None,
    tsv: bool = False,
    check_counts: bool = True,
    workers: int | None = None,
) -> Path:
    """Generate the ListOps data set of the Long Range Arena, or read the published one.

    Args:
        to: Folder to create. If it already holds a data set with these settings, it is reused.
        source: The folder of the published basic_train.tsv, basic_val.tsv and basic_test.tsv, or the release around it,
            to read instead of drawing.
        train: Samples for training; 96,000 if not given.
        val: Samples for validation; 2,000 if not given.
        test: Samples for the test; 2,000 if not given.
        seed: Decides the samples, together with the lengths, depth and arguments; 0 if not given.
        min_length: Expressions are longer than this many tokens; 500 if not given.
        max_length: Expressions are shorter than this many tokens; 2,000 if not given.
        max_depth: Nesting depth at which only digits are left; a lone digit has depth 1. 10 if not given.
        max_args: The most arguments an operator takes, 10 if not given; the fewest are 2.
        tsv: Also write basic_train.tsv, basic_val.tsv and basic_test.tsv, the official form, into the folder.
        check_counts: Incomplete files are an error, otherwise a warning: published ones, or those of `tsv`, whose
            number of samples is in dataset.json beside them.
        workers: Threads to draw with; all cores if not given. They do not change the result.

    Returns:
        The folder, ready for `ListOps`.

    Raises:
        ValueError: An impossible setting; a folder that is in use or cannot be written (all checked before the work);
            fewer different expressions than requested samples; or a missing or damaged source (file and line are
            named).
    """
    to = Path(to).expanduser().resolve()
    options = {"test": test, "val": val, "train": train, "seed": seed}
    options |= {"min_length": min_length, "max_length": max_length, "max_depth": max_depth, "max_args": max_args}
    given = {name: value for name, value in options.items() if value is not None}
    check_at_least("--workers", 1 if workers is None else workers, 1)
    if source is None and not check_counts:
        raise ValueError("--no-check-counts is given, but without --from there are no files to count: leave it out.")
    if source is None:
        _generate(to, PUBLISHED_SETTINGS | given, workers or cores())
    elif given:
        raise ValueError(
            f"{', '.join(given)} cannot be chosen for published files: leave it out, or leave --from out to generate"
            " expressions."
        )
    else:
        from nystrom_lab.data.lra.listops.tsv import import_tsv

        import_tsv(Path(source), to, check_counts=check_counts)
    if tsv:
        from nystrom_lab.data.lra.listops.tsv import export_tsv

        export_tsv(to)
    return to


class ListOps(Split):
    """One split of prepared expressions: `input_ids` (numbers of `VOCABULARY`, 0 pads) and `labels` (the value)."""

    task = TASK
    vocab_size = len(VOCABULARY)
    num_labels = 10
    classes = tuple("0123456789")

    def __init__(self, folder: Path, split: str):
        super().__init__(folder, split)
        if (largest := self._samples.tokens.max(initial=0)) >= self.vocab_size:
            path = self.folder / f"{split}_tokens.npy"
            raise damaged(path, f"holds the token {largest}, and there are {self.vocab_size}", TASK)

    @property
    def firsts(self) -> NDArray[np.unsignedinteger]:
        """First token of each expression, which is its operator."""
        return self._samples.tokens[self._samples.offsets[:-1]]


def first_operator_share(train: ListOps, test: ListOps) -> float:
    """Accuracy on `test` of a baseline that reads the first operator.

    The guess is the value that most expressions of `train` with that operator have: 0 after MIN, 9 after MAX. It is
    right in a third of all expressions, twice as many as the largest class has.
    """
    counts = np.zeros((ListOps.vocab_size, ListOps.num_labels), dtype=np.int64)
    np.add.at(counts, (train.firsts, train.labels), 1)
    return float(np.mean(counts.argmax(1)[test.firsts] == test.labels)) if len(test) else 0.0


def _generate(to: Path, settings: Mapping[str, int], workers: int) -> None:
    """Generate the data set of these settings, unless the folder holds it."""
    sizes = {split: settings[split] for split in ("test", "val", "train")}
    for name, value in (*sizes.items(), ("seed", settings["seed"])):
        check_at_least(f"--{name}", value, 0)
    if not any(sizes.values()):
        raise ValueError("train, val and test are all 0: ask for at least one sample.")
    limits = Limits(**{field.name: settings[field.name] for field in fields(Limits)})
    named = {"origin": "generated", **settings}
    if holds(to, task=TASK, settings=named):
        return
    with new_folder(to, task=TASK, settings=named) as partial:
        sequences, labels = _distinct(sum(sizes.values()), settings["seed"], limits, workers)
        start = 0
        for split, size in sizes.items():
            end = start + size
            write_split(partial, split, gather(sequences[start:end], labels[start:end]))
            start = end


def _distinct(
    total: int, seed: int, limits: Limits, workers: int
) -> tuple[list[NDArray[np.unsignedinteger]], list[int]]:
    """Draw until there are `total` different expressions."""
    sequences: list[NDArray[np.unsignedinteger]] = []
    labels: list[int] = []
    seen: set[bytes] = set()
    drawn = 0
    bar = Progress("ListOps", total, unit="samples")
    with bar, closing(_chunks(seed, limits, workers)) as chunks:
        for chunk in chunks:
            before = len(sequences)
            for start, end, label in zip(chunk.offsets[:-1], chunk.offsets[1:], chunk.labels, strict=True):
                sequence = chunk.tokens[start:end]
                digest = hashlib.blake2b(sequence.tobytes(), digest_size=16).digest()
                if digest not in seen and len(sequences) < total:
                    seen.add(digest)
                    sequences.append(sequence)
                    labels.append(int(label))
            bar.update(len(sequences) - before)
            if len(sequences) == total:
                break
            drawn += chunk.labels.size
            # At the published lengths next to nothing repeats; where most does, the expressions are running out.
            if drawn > 20 * total + 100_000:
                raise ValueError(
                    f"train, val and test ask for {total} different samples, but {drawn} expressions between"
                    f" --min-length {limits.min_length} and --max-length {limits.max_length} held only"
                    f" {len(sequences)}: ask for fewer samples, or for longer ones."
                )
    return sequences, labels


def _chunks(seed: int, limits: Limits, workers: int) -> Generator[TokenSamples, None, None]:
    """Yield the chunks of attempts in order, drawn a little ahead; numpy lets threads run side by side."""
    from nystrom_lab.data.lra.chunks import child_generator, in_order

    attempts = min(2**14, max(16, 2**24 // limits.max_length))

    def chunk(number: int) -> TokenSamples:
        return draw_expressions(child_generator(seed, number), attempts, limits)

    return in_order(ThreadPoolExecutor(workers), chunk, count(), ahead=workers + 1)
