"""The official form is built and evaluated here independently, as binary trees, in the way of its source."""

import json
import random

import numpy as np
import pytest

from nystrom_lab.data.lra.listops import tsv as lra_listops_tsv
from nystrom_lab.data.lra.listops.expressions import VOCABULARY
from nystrom_lab.data.lra.listops.task import ListOps, prepare_listops
from nystrom_lab.data.lra.listops.tsv import AT_ONCE, export_tsv, import_tsv, read_tsv, write_tsv
from nystrom_lab.data.store.token_files import SPLITS, gather

EXAMPLE = b"Source\tTarget\r\n( ( ( [MAX 3 ) 4 ) ] )\t4\r\n( ( ( [SM 9 ) ( ( ( [MED 5 ) 8 ) ] ) ) ] )\t5\r\n7\t7\r\n"
NUMBER = {word: number for number, word in enumerate(VOCABULARY)}


def random_tree(rng, depth=1):
    if depth == 5 or rng.random() > 0.4:
        return str(rng.randrange(10))
    tree = (rng.choice(["[MIN", "[MAX", "[MED", "[SM"]), random_tree(rng, depth + 1))
    for _ in range(rng.randint(1, 4)):
        tree = (tree, random_tree(rng, depth + 1))
    return (tree, "]")


def tree_text(tree):
    return tree if isinstance(tree, str) else f"( {tree_text(tree[0])} {tree_text(tree[1])} )"


def tree_value(tree):
    if isinstance(tree, str):
        return tree if tree[0] in "[]" else int(tree)
    left, right = map(tree_value, tree)
    if isinstance(left, str):
        return left, [right]
    if right == "]":
        operator, values = left
        by_name = {"[MIN": min, "[MAX": max, "[MED": np.median, "[SM": lambda values: sum(values) % 10}
        return int(by_name[operator](values))
    return left[0], [*left[1], right]


def tree_tokens(tree):
    if isinstance(tree, str):
        return [NUMBER["X" if tree == "]" else tree]]
    return tree_tokens(tree[0]) + tree_tokens(tree[1])


@pytest.fixture
def official(tmp_path, monkeypatch):
    """Three files of three samples, as if three were the published number."""
    monkeypatch.setattr(lra_listops_tsv, "PUBLISHED_COUNTS", dict.fromkeys(SPLITS, 3))
    folder = tmp_path / "official"
    folder.mkdir()
    for digit, split in enumerate(SPLITS):
        (folder / f"basic_{split}.tsv").write_bytes(EXAMPLE.replace(b"7", b"%d" % digit))
    return folder


def test_trees_are_written_and_read_as_their_source_does(tmp_path):
    rng = random.Random(1)
    trees = [random_tree(rng) for _ in range(500)]
    assert max(map(len, map(tree_tokens, trees))) > 30
    tokens = [np.array(tree_tokens(tree), dtype=np.uint8) for tree in trees]
    samples = gather(tokens, [tree_value(tree) for tree in trees])
    path = tmp_path / "basic_val.tsv"
    write_tsv(path, samples)
    lines = [f"{tree_text(tree)}\t{tree_value(tree)}" for tree in trees]
    assert path.read_bytes() == "".join(f"{line}\r\n" for line in ["Source\tTarget", *lines]).encode()
    for ours, theirs in zip(read_tsv(path), samples, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_line_ends_of_either_kind_and_a_missing_last_one_are_read(tmp_path):
    path = tmp_path / "basic_test.tsv"
    path.write_bytes(EXAMPLE.replace(b"\r\n", b"\n").removesuffix(b"\n"))
    samples = read_tsv(path)
    assert samples.labels.tolist() == [4, 5, 7]
    assert " ".join(VOCABULARY[token] for token in samples.tokens) == "[MAX 3 4 X [SM 9 [MED 5 8 X X 7"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"begins with '': the first line of an official file is 'Source\\tTarget'"),
        (b"Source,Target\r\n7,7\r\n", "begins with 'Source,Target'"),
        (b"\x93NUMPY\x01\x00v\x00{'descr'", "begins with "),
        (b"Source\tTarget\r\n", "holds no samples"),
        (EXAMPLE + b"( ( ( [MAX 3 ) 4", r"line 5: '\( \( \( \[MAX 3 \) 4' has no tab.* cut off"),
        (EXAMPLE + b"\r\n", r"line 5: '\\r\\n' has no tab"),
        (EXAMPLE + b"7\t", "line 5: the target is ''.* must be a digit"),
        (EXAMPLE + b"7\t10\r\n", "line 5: the target is '10'"),
        (EXAMPLE + b"7\t7\t7\r\n", r"line 5: the target is '7\\t7'"),
        (EXAMPLE + b"( ( ( [FIRST 3 ) 4 ) ] )\t3\r\n", r"line 5: unknown token '\[FIRST'.* \[MIN \[MAX \[MED \[SM \]"),
        (EXAMPLE + b"12\t2\r\n", "line 5: unknown token '12'"),
        (EXAMPLE + b"( ( [MAX 3 ) 4\t4\r\n", "line 5: .* is not one complete expression"),
        (EXAMPLE + b"\t4\r\n", "line 5: '' is not one complete expression"),
        (EXAMPLE + b"( ( ( [MIN 3 ) 4 ) ] )\t4\r\n", "line 5: the target is 4 but the source has the value 3"),
    ],
)
def test_a_wrong_file_raises_by_name_and_line(official, tmp_path, content, message):
    path = official / "basic_val.tsv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        import_tsv(official, tmp_path / "to")
    assert str(path) in str(caught.value)
    # No partial data are left, neither the folder nor the one it was made in.
    assert list(tmp_path.iterdir()) == [official]


def test_a_wrong_target_is_found_far_down(official):
    path = official / "basic_val.tsv"
    path.write_bytes(EXAMPLE + b"6\t6\r\n" * AT_ONCE + b"4\t3\r\n")
    with pytest.raises(ValueError, match=f"line {AT_ONCE + 5}: the target is 3 but the source has the value 4"):
        read_tsv(path)


def test_official_files_become_a_data_set(official, tmp_path, capsys):
    to = prepare_listops(tmp_path / "to", source=official)
    data = ListOps(to, "val")
    assert data.labels.tolist() == [4, 5, 1]
    assert data.lengths.tolist() == [4, 7, 1]
    before = (to / "dataset.json").stat().st_mtime_ns
    assert prepare_listops(to, source=official) == to
    assert "already holds this data set" in capsys.readouterr().err
    assert (to / "dataset.json").stat().st_mtime_ns == before


def test_other_official_files_are_not_taken_for_these(official, tmp_path):
    import_tsv(official, tmp_path / "to")
    (official / "basic_test.tsv").write_bytes(EXAMPLE.replace(b"7", b"8"))
    with pytest.raises(ValueError, match=r"other settings \(test_sha256="):
        import_tsv(official, tmp_path / "to")


def test_so_many_were_published():
    # The fixture above replaces them.
    assert lra_listops_tsv.PUBLISHED_COUNTS == {"train": 96_000, "val": 2_000, "test": 2_000}


def cut(path):
    """Remove the last line of a file."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def test_a_file_that_was_cut_at_the_end_of_a_line_is_named_by_its_count(official, tmp_path, capsys):
    cut(official / "basic_val.tsv")
    says = r"official: val has 2 samples where 3 were published: a file is truncated .*--no-check-counts"
    with pytest.raises(ValueError, match=says):
        prepare_listops(tmp_path / "to", source=official)
    assert list(tmp_path.iterdir()) == [official]
    to = prepare_listops(tmp_path / "to", source=official, check_counts=False)
    assert "warning" in (said := capsys.readouterr().err)
    assert "official: val has 2 samples where 3 were published.\n" in said
    assert len(ListOps(to, "val")) == 2
    # Data that were accepted as incomplete do not count as complete later.
    with pytest.raises(ValueError, match=r"to: val has 2 samples where 3 were published"):
        prepare_listops(to, source=official)
    assert prepare_listops(to, source=official, check_counts=False) == to


@pytest.fixture
def drawn(tmp_path):
    return prepare_listops(tmp_path / "drawn", train=6, val=4, test=5, min_length=5, max_length=40, tsv=True)


def test_files_of_this_library_are_counted_by_the_header_beside_them_and_without_it_as_published(drawn, tmp_path):
    cut(drawn / "basic_test.tsv")
    with pytest.raises(ValueError, match=r"drawn: test has 4 samples where 5 are in dataset\.json: a file is"):
        prepare_listops(tmp_path / "to", source=drawn)
    assert len(ListOps(prepare_listops(tmp_path / "to", source=drawn, check_counts=False), "test")) == 4
    (drawn / "dataset.json").unlink()
    with pytest.raises(ValueError, match="train has 6 samples where 96000 were published; val has 4 samples where"):
        prepare_listops(tmp_path / "other", source=drawn)


@pytest.mark.parametrize("content", ["{", "{}", None])
def test_a_header_without_counts_is_not_skipped(drawn, tmp_path, content, capsys):
    header = json.loads((drawn / "dataset.json").read_text())
    del header["splits"]["val"]["samples"]
    (drawn / "dataset.json").write_text(json.dumps(header) if content is None else content)
    says = "dataset.json should count the samples of the files beside it, and is not a header"
    with pytest.raises(ValueError, match=says):
        prepare_listops(tmp_path / "to", source=drawn)
    prepare_listops(tmp_path / "to", source=drawn, check_counts=False)
    assert "dataset.json should count the samples" in capsys.readouterr().err


def test_samples_missing_once_are_missing_in_exported_files(official, tmp_path):
    cut(official / "basic_val.tsv")
    once = prepare_listops(tmp_path / "once", source=official, check_counts=False, tsv=True)
    with pytest.raises(ValueError, match="once: val has 2 samples where 3 were published"):
        prepare_listops(tmp_path / "twice", source=once)
    twice = prepare_listops(tmp_path / "twice", source=once, check_counts=False)
    assert len(ListOps(twice, "val")) == 2


def test_counts_are_of_files(tmp_path):
    with pytest.raises(ValueError, match="--no-check-counts is given, but without --from there are no files to count"):
        prepare_listops(tmp_path / "to", check_counts=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("check_counts", [True, False])
def test_the_same_file_twice_is_named(official, tmp_path, check_counts):
    (official / "basic_test.tsv").write_bytes((official / "basic_train.tsv").read_bytes())
    says = r"basic_train.tsv and .*basic_test.tsv are the same file, so train and test would hold the same samples"
    with pytest.raises(ValueError, match=says):
        prepare_listops(tmp_path / "to", source=official, check_counts=check_counts)
    assert list(tmp_path.iterdir()) == [official]


def test_missing_official_files_are_named(official, tmp_path):
    (official / "basic_val.tsv").unlink()
    with pytest.raises(ValueError, match=r"official lacks basic_val.tsv: all three official files are needed"):
        import_tsv(official, tmp_path / "to")
    with pytest.raises(ValueError, match=r"is one of three official files: name their folder, .*official\."):
        import_tsv(official / "basic_test.tsv", tmp_path / "to")


@pytest.mark.parametrize("inside", ["listops-1000", "lra_release/listops-1000"])
def test_official_files_are_found_inside_of_their_release(official, tmp_path, inside):
    (tmp_path / "release" / inside).parent.mkdir(parents=True)
    official.rename(tmp_path / "release" / inside)
    to = prepare_listops(tmp_path / "to", source=tmp_path / "release")
    assert ListOps(to, "train").labels.tolist() == [4, 5, 0]


@pytest.mark.parametrize(("source", "came"), [("nowhere", "does not exist"), ("", "holds no official ListOps files")])
def test_a_source_without_official_files_says_where_they_are_published(tmp_path, source, came):
    says = f"{came}: name the folder of basic_train.tsv.*https://storage.*, or leave --from out"
    with pytest.raises(ValueError, match=says):
        prepare_listops(tmp_path / "to", source=tmp_path / source)
    assert not list(tmp_path.iterdir())


def test_options_of_a_draw_cannot_be_chosen_for_official_files(official, tmp_path):
    with pytest.raises(ValueError, match="train, seed, max_length cannot be chosen for published files"):
        prepare_listops(tmp_path / "to", source=official, train=3, seed=0, max_length=50)
    assert list(tmp_path.iterdir()) == [official]


def test_a_prepared_data_set_goes_out_and_comes_back(tmp_path):
    made = prepare_listops(tmp_path / "made", train=60, val=20, test=20, min_length=10, max_length=90, tsv=True)
    back = prepare_listops(tmp_path / "back", source=made, tsv=True)
    for split in SPLITS:
        for part in ("tokens", "offsets", "labels"):
            name = f"{split}_{part}.npy"
            assert (made / name).read_bytes() == (back / name).read_bytes()
        assert (made / f"basic_{split}.tsv").read_bytes() == (back / f"basic_{split}.tsv").read_bytes()
    assert json.loads((back / "dataset.json").read_text())["settings"]["origin"] == "official files"


def test_a_file_that_fails_half_way_is_not_left(tmp_path):
    # The second expression has a token that is none.
    samples = gather([np.array([NUMBER["7"]], dtype=np.uint8), np.array([99], dtype=np.uint8)], [7, 0])
    with pytest.raises(IndexError):
        write_tsv(tmp_path / "basic_val.tsv", samples)
    assert not list(tmp_path.iterdir())


def test_a_disk_without_space_for_the_files_is_named(drawn, no_space):
    before = sorted(path.name for path in drawn.iterdir())
    (drawn / "basic_val.tsv").unlink(missing_ok=True)
    with pytest.raises(OSError, match=r"basic_val.tsv cannot be written \(No space left on device\): free space"):
        export_tsv(drawn)
    assert sorted(path.name for path in drawn.iterdir()) == [name for name in before if name != "basic_val.tsv"]
