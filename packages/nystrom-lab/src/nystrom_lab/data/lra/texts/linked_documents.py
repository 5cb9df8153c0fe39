r"""Pairs of documents, linked or not, from a folder of documents and of links between them, such as citations.

A file named documents or docs has one document per row, with the fields id and text; one named links or citations has
two columns of ids, one link per row. This is a substitute for Retrieval of the Long Range Arena if its own files are
not available: other papers, fewer of them, and other pairs.

**Splits.** No document is in pairs of two splits. The test documents are grown from one chosen by the seed: the next is
always the one with the most links into the set, so that most links stay inside; then those of val. Links between splits
are left out, and counted.

**Equal texts.** Documents of one text, cut as the samples are, are one document where they would otherwise bring that
text into two splits, give a pair of texts both labels, or pair a text with itself; then they are counted. A
paper may be listed twice, or a page have an address for each of its versions.

**Negatives.** As many as links, in each split: the same first documents with the second ones exchanged among them, so
that each document is first, and is second, as often in negatives as in links. A document's
identity does not predict the label.

**Baseline.** TF-IDF: the share of pairs that a threshold on the cosine of both texts' TF-IDF vectors
gets right (a word's count times $\log(N / \text{documents that hold it})$ of all N), the threshold chosen on train. A
model that is not above it has learned nothing else.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nystrom_lab.data.sources.row_files import is_row_file, plain_name, read_fields
from nystrom_lab.data.sources.source import LabelledRow, Source
from nystrom_lab.data.store.prepared_folder import sha256_of_splits
from nystrom_lab.data.store.token_files import SPLITS

DOCUMENTS, LINKS = ("documents", "docs"), ("links", "citations")
_FIELDS = {"id": ("id", "doc_id", "document"), "text": ("text", "content")}
_ENDS = {"from": ("citing", "from", "id1", "source"), "to": ("cited", "to", "id2", "target")}
_SHARE = 0.1
# Exchanges that are tried for each pair that is a link or comes twice.
_TRIES = 2000


class LinkedFiles(NamedTuple):
    """The two files of a folder."""

    documents: Path
    links: Path


class Pair(NamedTuple):
    """Two documents, and whether they are linked."""

    first: str
    second: str
    linked: bool


def find_linked(folder: Path) -> LinkedFiles | None:
    """The files of documents and links in a folder; None if it does not hold both."""
    paths = {}
    for kind, names in (("documents", DOCUMENTS), ("links", LINKS)):
        files = [file for file in sorted(folder.iterdir()) if is_row_file(file) and _stem(file) in names]
        if len(files) > 1:
            raise ValueError(f"{folder} holds {' and '.join(file.name for file in files)}: leave one of them.")
        if files:
            paths[kind] = files[0]
    return LinkedFiles(**paths) if len(paths) == 2 else None


def linked_source(
    files: LinkedFiles,
    *,
    max_length: int,
    seed: int,
    val_share: float | None = None,
    test_share: float | None = None,
) -> Source:
    """Draw the pairs of a folder; arguments as in `prepare_retrieval`, the shares those of the documents.

    Raises:
        ValueError: A duplicate document, a link to an unknown document or from a document to itself, or a split without
            links.
    """
    texts = _documents(files.documents)
    links = _links(files.links, texts)
    shares = {"test": _SHARE if test_share is None else test_share, "val": _SHARE if val_share is None else val_share}
    pairs = _drawn(files.links, links, shares, seed)
    first = first_of_text(texts, max_length)
    remarks: list[str] = []
    if joins := mixes_texts(pairs, first):
        whole, links = len(links), joined_links(links, first)
        equal = f"{len(first) - len({*first.values()})} documents have the text of another and count as that one"
        remarks.append(f"{equal}, which leaves {len(links)} of {whole} links")
        pairs = _drawn(files.links, links, shares, seed)
    kept = sum(pair.linked for of in pairs.values() for pair in of)
    baseline = overlap_accuracy(pairs, texts, max_length)

    def rows() -> Iterator[LabelledRow]:
        for split in SPLITS:
            for pair in pairs[split]:
                place = f"{files.links}, {pair.first} and {pair.second}"
                both = texts[pair.first], texts[pair.second]
                yield LabelledRow(place, split, "1" if pair.linked else "0", both, _rank(seed, pair))

    return Source(
        kind="documents and links",
        settings=lambda: {
            **{f"{kind}_sha256": digest for kind, digest in sha256_of_splits(files._asdict()).items()},
            "document_shares": f"val {shares['val']:g}, test {shares['test']:g}",
            **({"equal_texts": "one document"} if joins else {}),
        },
        splits=SPLITS,
        rows=rows,
        remarks=[
            *remarks,
            f"a stand-in for the papers' pairs: {kept} of {len(links)} links are inside a split, with as many pairs "
            "that are not linked",
            f"a TF-IDF baseline to beat has {100 * baseline['test']:.1f} % of the test pairs and "
            f"{100 * baseline['val']:.1f} % of val (cosine, threshold from train)",
        ],
    )


def first_of_text(texts: Mapping[str, bytes], max_length: int) -> dict[str, str]:
    """For each document, the first one with the same text, after truncation."""
    first: dict[bytes, str] = {}
    return {name: first.setdefault(text[:max_length], name) for name, text in texts.items()}


def mixes_texts(pairs: Mapping[str, Sequence[tuple[str, str, bool]]], first: Mapping[str, str]) -> bool:
    """Whether a text is in two splits, a pair of texts has both labels, or a text is paired with itself."""
    split_of: dict[str, str] = {}
    labels: dict[frozenset[str], bool] = {}
    for split, of in pairs.items():
        for start, end, linked in of:
            ends = frozenset((first[start], first[end]))
            if len(ends) == 1 or labels.setdefault(ends, linked) != linked:
                return True
            if any(split_of.setdefault(text, split) != split for text in ends):
                return True
    return False


def joined_links(links: Sequence[tuple[str, str]], first: Mapping[str, str]) -> list[tuple[str, str]]:
    """The links between texts, each once, without self-links."""
    joined: dict[frozenset[str], tuple[str, str]] = {}
    for ends in ((first[start], first[end]) for start, end in links):
        if ends[0] != ends[1]:
            joined.setdefault(frozenset(ends), ends)
    return list(joined.values())


def split_documents(links: Sequence[tuple[str, str]], shares: Mapping[str, float], seed: int) -> dict[str, str]:
    """The split of each document that has a link; each split except train grows along the links."""
    neighbours: dict[str, Counter[str]] = {}
    for first, second in links:
        neighbours.setdefault(first, Counter())[second] += 1
        neighbours.setdefault(second, Counter())[first] += 1
    order = sorted(neighbours, key=lambda name: _hash(seed, name))
    places = {name: place for place, name in enumerate(order)}
    split_of: dict[str, str] = {}
    for split, share in shares.items():
        inside: Counter[str] = Counter()
        for _ in range(round(share * len(order))):
            free = (name for name in inside if name not in split_of)
            best = max(free, key=lambda name: (inside[name], -places[name]), default=None)
            best = next(name for name in order if name not in split_of) if best is None else best
            split_of[best] = split
            inside.update(neighbours[best])
    return {name: split_of.get(name, "train") for name in order}


def unlinked(links: Sequence[tuple[str, str]], known: Sequence[tuple[str, str]], seed: int) -> list[Pair]:
    """An equal number of pairs without a link, from the same first and second documents; none is of the known links.

    Raises:
        ValueError: The links are too dense to find that many other pairs.
    """
    linked = {frozenset(pair) for pair in known}
    firsts, seconds = [pair[0] for pair in links], [pair[1] for pair in links]
    generator = np.random.default_rng(seed)
    seconds = [seconds[place] for place in generator.permutation(len(seconds))]
    uses = Counter(frozenset(pair) for pair in zip(firsts, seconds, strict=True))

    def is_bad(first: str, second: str, most: int) -> bool:
        return first == second or frozenset((first, second)) in linked or uses[frozenset((first, second))] > most

    for place in range(len(links)):
        tries = 0
        while is_bad(firsts[place], seconds[place], 1):
            if (tries := tries + 1) > _TRIES:
                raise ValueError(
                    f"{len(links)} links join so many of their documents that there are not as many other pairs: add "
                    "documents, or use other shares."
                )
            other = int(generator.integers(len(links)))
            mine, theirs = (firsts[place], seconds[other]), (firsts[other], seconds[place])
            if mine == theirs or is_bad(*mine, 0) or is_bad(*theirs, 0):
                continue
            for at in (place, other):
                uses[frozenset((firsts[at], seconds[at]))] -= 1
            seconds[place], seconds[other] = seconds[other], seconds[place]
            for at in (place, other):
                uses[frozenset((firsts[at], seconds[at]))] += 1
    return [Pair(first, second, False) for first, second in zip(firsts, seconds, strict=True)]


def overlap_accuracy(
    pairs: Mapping[str, Sequence[Pair]], texts: Mapping[str, bytes], max_length: int
) -> dict[str, float]:
    """For each split, the accuracy of a threshold on the cosine of TF-IDF vectors, chosen on train."""
    names = sorted({name for of in pairs.values() for pair in of for name in pair[:2]})
    counts = {name: Counter(texts[name][:max_length].lower().split()) for name in names}
    holders = Counter(word for words in counts.values() for word in words)
    vectors = {
        name: {word: count * math.log(len(names) / holders[word]) for word, count in words.items()}
        for name, words in counts.items()
    }
    sizes = {name: math.hypot(*vector.values()) for name, vector in vectors.items()}

    def cosine(pair: Pair) -> float:
        first, second = sorted((vectors[pair.first], vectors[pair.second]), key=len)
        size = sizes[pair.first] * sizes[pair.second]
        return sum(value * second.get(word, 0.0) for word, value in first.items()) / size if size else 0.0

    values = {split: np.array([cosine(pair) for pair in of]) for split, of in pairs.items()}
    labels = {split: np.array([pair.linked for pair in of]) for split, of in pairs.items()}
    order = np.argsort(values["train"], kind="stable")
    # Pairs above the threshold are linked: right are the others below it and the links above.
    below = np.concatenate([[0], np.cumsum(~labels["train"][order])])
    above = labels["train"].sum() - np.concatenate([[0], np.cumsum(labels["train"][order])])
    cut = int(np.argmax(below + above))
    ranked = values["train"][order]
    threshold = -math.inf if cut == 0 else math.inf if cut == len(ranked) else (ranked[cut - 1] + ranked[cut]) / 2
    return {split: float(np.mean((values[split] > threshold) == labels[split])) for split in values}


def _drawn(
    path: Path, links: Sequence[tuple[str, str]], shares: Mapping[str, float], seed: int
) -> dict[str, list[Pair]]:
    """The pairs of each split."""
    splits = split_documents(links, shares, seed)
    inside = {split: [pair for pair in links if splits[pair[0]] == splits[pair[1]] == split] for split in SPLITS}
    for split, kept in inside.items():
        if not kept:
            raise ValueError(
                f"{split} gets none of the {len(links)} links of {path}: add links, or use a larger share."
            )
    return {
        split: [*(Pair(*pair, True) for pair in kept), *unlinked(kept, links, seed)] for split, kept in inside.items()
    }


def _documents(path: Path) -> dict[str, bytes]:
    texts: dict[str, bytes] = {}
    for line, (name, text) in read_fields(path, _FIELDS):
        key = name.decode("utf-8", errors="replace").strip()
        if key in texts:
            raise ValueError(f"{path}, line {line}: the document {key[:40]!r} comes twice: remove one.")
        texts[key] = text
    return texts


def _links(path: Path, texts: Mapping[str, bytes]) -> list[tuple[str, str]]:
    """The links, each once regardless of direction."""
    links: dict[frozenset[str], tuple[str, str]] = {}
    for line, ends in read_fields(path, _ENDS):
        first, second = (end.decode("utf-8", errors="replace").strip() for end in ends)
        if missing := [name for name in (first, second) if name not in texts]:
            raise ValueError(
                f"{path}, line {line}: there is no document {missing[0][:40]!r}: add it, or remove the link."
            )
        if first == second:
            raise ValueError(f"{path}, line {line}: {first[:40]!r} is linked with itself: remove the line.")
        links.setdefault(frozenset((first, second)), (first, second))
    return list(links.values())


def _stem(path: Path) -> str:
    return Path(plain_name(path)).stem.lower()


def _hash(seed: int, *words: str) -> int:
    text = "\0".join((str(seed), *words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _rank(seed: int, pair: Pair) -> int:
    """The rank of a pair: the stored order reveals nothing about labels."""
    return _hash(seed, pair.first, pair.second, str(pair.linked)) >> 1
