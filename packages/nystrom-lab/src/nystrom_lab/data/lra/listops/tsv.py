"""ListOps as official files: basic_train.tsv, basic_val.tsv and basic_test.tsv, with the columns Source and Target.

Source is the expression as a binary tree in parentheses: `[MAX 3 4 ]` is written `( ( ( [MAX 3 ) 4 ) ] )`, where each
argument and the closing bracket are joined to all before them. Target is its value. The reader drops the parentheses,
maps `]` to the token X, splits on white space, and then checks the file: brackets must pair, and each target must be
the value of its source. A file that was cut at the end of a line is found by its count: 96,000 / 2,000 / 2,000 were
published, and how many `export_tsv` wrote is in the header of the data set beside the files.

Source: https://github.com/google-research/long-range-arena, `data/listops.py` and `listops/input_pipeline.py`.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nystrom.input_files import open_input
from nystrom.progress import Progress
from nystrom.whole_files import whole_file
from nystrom_lab.data.lra.facts import published_files
from nystrom_lab.data.lra.listops.expressions import (
    CLOSE,
    DEEPEST,
    MIN,
    PUBLISHED_COUNTS,
    TASK,
    VOCABULARY,
    ZERO,
    evaluate_expressions,
    is_expression,
)
from nystrom_lab.data.store.prepared_folder import holds, new_folder, sha256_of_splits
from nystrom_lab.data.store.token_files import (
    HEADER,
    SPLITS,
    TokenSamples,
    gather,
    open_split,
    read_header,
    write_split,
)

# The folder of the official files inside the release.
FOLDER = "listops-1000"
COLUMNS = b"Source\tTarget"
WORDS = {b"]" if token == CLOSE else VOCABULARY[token].encode(): token for token in range(ZERO, CLOSE + 1)}
TARGETS = {str(digit).encode(): digit for digit in range(10)}
NO_PARENTHESES = bytes.maketrans(b"()", b"  ")
# Samples whose values are computed together: enough for speed, few enough for memory.
AT_ONCE = 1000


def tsv_name(split: str) -> str:
    """Name the official file of a split."""
    return f"basic_{split}.tsv"


def import_tsv(source: Path, to: Path, *, check_counts: bool = True) -> None:
    """Turn the official ListOps files into a data set that `ListOps` opens; arguments as in `prepare_listops`.

    Raises:
        ValueError: A file is missing, duplicated, incomplete or wrong (the line is named), or `to` is in use or cannot
            be written.
    """
    files = _find_files(source.expanduser())
    folder = files["train"].parent
    digests = sha256_of_splits(files)
    settings = {"origin": "official files"} | {f"{split}_sha256": digest for split, digest in digests.items()}
    if holds(to, task=TASK, settings=settings):
        _raise_for(to, _differences(folder, _counts(read_header(to, TASK))) if check_counts else [])
        return
    facts: dict[str, Any] = {}
    with new_folder(to, task=TASK, settings=settings, facts=facts) as partial:
        counts = {}
        for split, path in files.items():
            samples = read_tsv(path)
            counts[split] = samples.labels.size
            write_split(partial, split, samples)
        differences = _differences(folder, counts)
        _raise_for(folder, differences if check_counts else [])
        facts["differences"] = differences
    for difference in differences:
        print(f"warning: {folder}: {difference}.", file=sys.stderr)


def _differences(folder: Path, counts: Mapping[str, int]) -> list[str]:
    """Compare the counts of the files in a folder with those of the header beside them, or else with the published."""
    wanted, known, whose = PUBLISHED_COUNTS, [], "were published"
    if (folder / HEADER).exists():
        try:
            header = read_header(folder, TASK)
        except ValueError:
            return [
                f"{folder / HEADER} should count the samples of the files beside it, and is not a header of ListOps"
            ]
        wanted, known, whose = _counts(header), header.get("facts", {}).get("differences", []), f"are in {HEADER}"
    return [
        *(
            f"{split} has {counts[split]} samples where {wanted[split]} {whose}"
            for split in SPLITS
            if counts[split] != wanted[split]
        ),
        # Lines that were missing when these files were written are still missing.
        *known,
    ]


def _counts(header: Mapping[str, Any]) -> dict[str, int]:
    return {split: counts["samples"] for split, counts in header["splits"].items()}


def _raise_for(folder: Path, differences: Sequence[str]) -> None:
    if differences:
        raise ValueError(
            f"{folder}: {'; '.join(differences)}: a file is truncated or wrong, fetch or make it again (or use"
            " it anyway with --no-check-counts)."
        )


def _find_files(source: Path) -> dict[str, Path]:
    """Find the three files in, or as, a source."""
    names = {split: tsv_name(split) for split in SPLITS}
    if files := published_files(source, names, folder=FOLDER):
        return files
    came = "holds no official ListOps files" if source.exists() else "does not exist"
    raise ValueError(
        f"{source} {came}: name the folder of {', '.join(names.values())} ({FOLDER} in"
        " https://storage.googleapis.com/long-range-arena/lra_release.gz), or leave --from out to generate"
        " expressions."
    )


def export_tsv(folder: Path) -> None:
    """Write the official files of a data set into its folder; files that are there stay as they are."""
    for split in SPLITS:
        if not (path := folder / tsv_name(split)).exists():
            write_tsv(path, open_split(folder, split, task=TASK))


def read_tsv(path: Path) -> TokenSamples:
    """Read one official file.

    Raises:
        ValueError: The header is wrong, or a line is cut off, holds an unknown token or a target that is not its value;
            the line is named.
    """
    sequences: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    size = path.stat().st_size
    with (
        open_input(path) as file,
        Progress(path.name, size, unit="B") as bar,
    ):
        header = file.readline().rstrip(b"\r\n")
        if header != COLUMNS:
            raise ValueError(
                f"{path} begins with {_shown(header)}: the first line of an official file is {_shown(COLUMNS)}."
            )
        for number, line in enumerate(file, start=2):
            try:
                tokens, label = _parse(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            sequences.append(tokens)
            labels.append(label)
            bar.update(len(line))
    if not sequences:
        raise ValueError(f"{path} holds no samples after its header: the file is cut off, fetch or make it again.")
    for start in range(0, len(sequences), AT_ONCE):
        batch = gather(sequences[start : start + AT_ONCE], labels[start : start + AT_ONCE])
        values = evaluate_expressions(batch.tokens)
        if (wrong := np.flatnonzero(values != batch.labels)).size:
            came, wanted, number = batch.labels[wrong[0]], values[wrong[0]], start + wrong[0] + 2
            raise ValueError(
                f"{path}, line {number}: the target is {came} but the source has the value {wanted}:"
                " the file is damaged or of another kind."
            )
    return gather(sequences, labels)


def write_tsv(path: Path, samples: TokenSamples) -> None:
    """Write one official file."""
    count = samples.labels.size
    # The official writer ends its lines as csv files do.
    with whole_file(path) as partial, partial.open("w", encoding="utf-8", newline="\r\n") as file:
        file.write(COLUMNS.decode() + "\n")
        for i in Progress(path.name, count, unit="samples").over(range(count)):
            source = to_official(samples.tokens[samples.offsets[i] : samples.offsets[i + 1]])
            file.write(f"{source}\t{samples.labels[i]}\n")


def to_official(tokens: NDArray[np.unsignedinteger]) -> str:
    """Write an expression as a binary tree in parentheses."""
    words: list[str] = []
    # From the end, where an operator comes after its arguments; for each open bracket the arguments so far.
    counts: list[int] = []
    for token in reversed(tokens.tolist()):
        joined = " )" if counts else ""
        if MIN <= token < CLOSE:
            words.append("( " * (counts.pop() + 1) + VOCABULARY[token])
            continue
        if counts:
            counts[-1] += 1
        if token == CLOSE:
            words.append("] )" + joined)
            counts.append(0)
        else:
            words.append(VOCABULARY[token] + joined)
    return " ".join(reversed(words))


def _parse(line: bytes) -> tuple[NDArray[np.uint8], int]:
    source, tab, target = line.rstrip(b"\r\n").partition(b"\t")
    if not tab:
        raise ValueError(
            f"{_shown(line)} has no tab: a line is Source, a tab and Target, so the file is cut off or of another kind."
        )
    if target not in TARGETS:
        raise ValueError(
            f"the target is {_shown(target)}: it must be a digit, so the file is cut off or of another kind."
        )
    try:
        tokens = bytes(map(WORDS.__getitem__, source.translate(NO_PARENTHESES).split()))
    except KeyError as error:
        known = " ".join(word.decode() for word in WORDS)
        raise ValueError(
            f"unknown token {_shown(error.args[0])}: ListOps has ( ) {known}, so the file is of another kind."
        ) from error
    expression = np.frombuffer(tokens, dtype=np.uint8)
    if not is_expression(expression):
        raise ValueError(
            f"{_shown(source)} is not one complete expression: its brackets do not pair"
            f" (or nest deeper than {DEEPEST}), so the file is damaged."
        )
    return expression, TARGETS[target]


def _shown(text: bytes) -> str:
    shown = text if len(text) <= 60 else text[:28] + b" ... " + text[-28:]
    return repr(shown.decode("ascii", errors="backslashreplace"))
