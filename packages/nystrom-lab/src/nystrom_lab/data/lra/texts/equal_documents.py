"""Documents with the same text: whether their pairs mix splits or labels, and their links merged.

A paper may be listed twice, or a page have an address for each of its versions. A text that is trained on under one
name must not be tested under another.
"""

from collections.abc import Mapping, Sequence


def first_of_text(texts: Mapping[str, bytes], max_length: int) -> dict[str, str]:
    """For each document, the first one with the same text, after truncation."""
    first: dict[bytes, str] = {}
    return {name: first.setdefault(text[:max_length], name) for name, text in texts.items()}


def mixes_texts(pairs: Mapping[str, Sequence[tuple[str, str, bool]]], first: Mapping[str, str]) -> bool:
    """Whether a text is in two splits, a pair of texts has both labels, or a text is paired with itself.

    Args:
        pairs: Pairs of documents, and whether they are linked, for each split.
        first: For each document, the one that represents its text.
    """
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
