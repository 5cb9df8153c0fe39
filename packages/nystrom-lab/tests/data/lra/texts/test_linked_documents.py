"""Linked pairs and others from documents and links."""

import json
import lzma
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nystrom_lab.data.lra.texts.linked_documents import (
    Pair,
    joined_links,
    mixes_texts,
    overlap_accuracy,
    split_documents,
    unlinked,
)
from nystrom_lab.data.lra.texts.retrieval import Retrieval, prepare_retrieval
from nystrom_lab.data.store.token_files import SPLITS

COUNT = 60
# Each is linked with the two that follow it.
LINKS = [(f"d{i}", f"d{(i + step) % COUNT}") for i in range(COUNT) for step in (1, 2)]


@pytest.fixture
def folder(tmp_path):
    source = tmp_path / "papers"
    source.mkdir()
    lines = [json.dumps({"id": f"d{i}", "text": f"text {i} of topic{i // 6}"}) + "\n" for i in range(COUNT)]
    (source / "docs.jsonl.xz").write_bytes(lzma.compress("".join(lines).encode()))
    body = "".join(f"{first}\t{second}\n" for first, second in LINKS)
    (source / "citations.tsv").write_text(f"citing\tcited\n{body}d1\td0\n")
    return source


def prepared(folder, to, **options):
    options = {"val_share": 0.25, "test_share": 0.25} | options
    to = prepare_retrieval(folder, to, **options)
    return {split: Retrieval(to, split) for split in SPLITS}


def names_of(data):
    found = []
    for sample, label in zip(data, data.labels, strict=True):
        texts = ((tokens - 1).astype(np.uint8).tobytes().decode() for tokens in sample["input_ids"])
        found.append((*(text.split()[1] for text in texts), int(label)))
    return found


def test_splits_share_no_document_and_negatives_are_no_links(folder, tmp_path, capsys):
    data = prepared(folder, tmp_path / "to")
    linked = {frozenset(pair) for pair in LINKS}
    seen = {}
    for split, of in data.items():
        pairs = names_of(of)
        seen[split] = {name for first, second, _ in pairs for name in (first, second)}
        links = [(f"d{first}", f"d{second}") for first, second, label in pairs if label]
        others = [(f"d{first}", f"d{second}") for first, second, label in pairs if not label]
        assert {frozenset(pair) for pair in links} <= linked
        assert not {frozenset(pair) for pair in others} & linked
        assert len({frozenset(pair) for pair in others}) == len(others) == len(links) > 0
        for end in (0, 1):
            assert Counter(pair[end] for pair in links) == Counter(pair[end] for pair in others)
        # Labels do not stand in blocks.
        assert len({label for *_, label in pairs[: len(pairs) // 2]}) == 2
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["val"]
    assert not seen["val"] & seen["test"]
    said = capsys.readouterr().err
    assert "notice: a stand-in for the papers' pairs" in said
    assert "notice: a TF-IDF baseline to beat has" in said


def test_one_text_under_two_ids_is_in_one_split_and_no_pair_has_both_labels(folder, tmp_path, capsys):
    # d0 and d1 are one text, d2 and d3 another, and so on: every second link leads from a text to itself.
    lines = [json.dumps({"id": f"d{i}", "text": f"text {i // 2} of topic{i // 12}"}) + "\n" for i in range(COUNT)]
    (folder / "docs.jsonl.xz").write_bytes(lzma.compress("".join(lines).encode()))
    seen, labels = {}, {}
    for split, of in prepared(folder, tmp_path / "to").items():
        pairs = names_of(of)
        assert pairs
        for first, second, label in pairs:
            assert first != second
            assert labels.setdefault(frozenset((first, second)), label) == label
            assert {seen.setdefault(name, split) for name in (first, second)} == {split}
    assert "30 documents have the text of another and count as that one, which leaves 30 of 120 links" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("pairs", "mixed"),
    [
        ({"train": [("a", "b", True)], "test": [("c", "d", True)]}, False),
        # Both of one text are in train, with one label for each pair.
        ({"train": [("a", "b", True), ("c", "A", False)], "test": [("d", "e", True)]}, False),
        ({"train": [("a", "b", True)], "test": [("A", "c", True)]}, True),
        ({"train": [("a", "b", True), ("b", "A", False)]}, True),
        ({"train": [("a", "A", False)]}, True),
    ],
)
def test_texts_are_mixed_where_a_split_a_label_or_a_pair_says_so(pairs, mixed):
    assert mixes_texts(pairs, {name: name.lower() for name in "abcdeA"}) == mixed


def test_links_of_one_text_come_once_and_none_leads_to_itself():
    same = {name: name.lower() for name in "abcAB"}
    found = joined_links([("A", "b"), ("b", "a"), ("a", "A"), ("B", "c"), ("a", "B")], same)
    assert found == [("a", "b"), ("b", "c")]


def test_texts_are_equal_as_far_as_they_are_kept(folder, tmp_path, capsys):
    prepared(folder, tmp_path / "whole")
    assert "of another" not in capsys.readouterr().err
    # All texts are cut to "text ".
    with pytest.raises(ValueError, match="gets none of the 0 links"):
        prepared(folder, tmp_path / "cut", max_length=5)


def test_the_same_seed_draws_the_same_pairs_and_another_others(folder, tmp_path):
    first, again, other = (
        names_of(prepared(folder, tmp_path / name, seed=seed)["train"]) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first == again != other


def test_sets_grow_along_links():
    # Two rings: a set of the size of one is one of them, so that no link is cut.
    rings = [(f"{ring}{i}", f"{ring}{(i + 1) % 10}") for ring in "ab" for i in range(10)]
    found = split_documents(rings, {"test": 0.5}, seed=3)
    assert len({found[f"a{i}"] for i in range(10)}) == 1


@given(seed=st.integers(0, 1000), jumps=st.sets(st.integers(1, 5), min_size=1, max_size=3))
@settings(max_examples=30, deadline=None)
def test_negatives_have_the_documents_of_the_links(seed, jumps):
    links = [(f"{i}", f"{(i + jump) % 20}") for i in range(20) for jump in sorted(jumps)]
    found = unlinked(links, links, seed)
    known = {frozenset(link) for link in links}
    assert sorted(pair.first for pair in found) == sorted(first for first, _ in links)
    assert sorted(pair.second for pair in found) == sorted(second for _, second in links)
    assert len({frozenset(pair[:2]) for pair in found} - known) == len(links)


def test_links_that_leave_no_other_pair_raise():
    with pytest.raises(ValueError, match="not as many other pairs"):
        unlinked([("a", "b"), ("c", "d")], [("a", "b"), ("c", "d"), ("a", "d"), ("c", "b")], 0)


def test_the_baseline_is_a_threshold_of_train():
    texts = {"a": b"x y", "b": b"x y z", "c": b"p q", "d": b"q p", "e": b"m n", "f": b"k l"}
    pairs = {
        "train": [Pair("a", "b", True), Pair("a", "c", False), Pair("e", "f", False)],
        "test": [Pair("c", "d", True), Pair("d", "e", True), Pair("a", "d", False), Pair("b", "f", False)],
    }
    assert overlap_accuracy(pairs, texts, 100) == {"train": 1.0, "test": 0.75}
    # By the first byte alone c and d, which begin with other words, are as far from each other as all.
    assert overlap_accuracy(pairs, texts, 1) == {"train": 1.0, "test": 0.5}


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("d1\tdx\n", "line 122: there is no document 'dx'"),
        ("d1\td1\n", "line 122: 'd1' is linked with itself"),
    ],
)
def test_a_broken_link_raises(folder, tmp_path, line, wanted):
    with (folder / "citations.tsv").open("a") as file:
        file.write(line)
    lines = (folder / "citations.tsv").read_text().count("\n")
    with pytest.raises(ValueError, match=wanted.replace("122", str(lines))):
        prepared(folder, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_a_document_that_comes_twice_raises(folder, tmp_path):
    (folder / "docs.jsonl.xz").unlink()
    (folder / "docs.csv").write_text("id,text\nd1,a\nd1,b\n")
    with pytest.raises(ValueError, match="line 3: the document 'd1' comes twice"):
        prepared(folder, tmp_path / "to")


def test_shares_that_leave_a_split_without_links_raise(folder, tmp_path):
    with pytest.raises(ValueError, match="val gets none of the 120 links"):
        prepared(folder, tmp_path / "to", val_share=0.001)
