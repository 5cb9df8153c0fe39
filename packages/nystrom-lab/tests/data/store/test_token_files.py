import json
import os
from pathlib import Path

import numpy as np
import pytest

from nystrom_lab.data.store.prepared_folder import holds, new_folder, verify
from nystrom_lab.data.store.token_files import HEADER, SPLITS, gather, open_members, open_split, read_facts, write_split

SETTINGS = {"seed": 0, "train": 2}
TRAIN = gather([np.array([3, 1, 2], dtype=np.uint8), np.array([5], dtype=np.uint8)], [1, 0])
EMPTY = gather([], [])


def make(to, settings=SETTINGS):
    with new_folder(to, task="listops", settings=settings) as partial:
        for split in SPLITS:
            write_split(partial, split, TRAIN if split == "train" else EMPTY)
    return to


def test_what_was_written_is_read(tmp_path):
    to = make(tmp_path / "deep" / "er" / "data")
    for split, samples in (("train", TRAIN), ("val", EMPTY), ("test", EMPTY)):
        for ours, theirs in zip(open_split(to, split, task="listops"), samples, strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
    verify(to, task="listops")
    assert os.listdir(tmp_path / "deep" / "er") == ["data"]


def test_a_folder_is_to_the_byte_what_it_was_in_version_0_3(tmp_path):
    """So folders that were prepared then are read, and theirs are read then."""
    header = json.loads((make(tmp_path / "data") / HEADER).read_text())
    assert (header["format"], header["version"], header["task"], header["settings"]) == (
        "nystrom-tokens", 1, "listops", SETTINGS
    )  # fmt: skip
    assert header["splits"]["train"] == {
        "samples": 2, "tokens": 4, "class_counts": [1, 1], "class_shares": [0.5, 0.5]
    }  # fmt: skip
    assert {name: (file["bytes"], file["sha256"][:16]) for name, file in header["files"].items()} == {
        "train_tokens.npy": (132, "5903619c67750186"),
        "train_offsets.npy": (152, "085451f7c7d0036c"),
        "train_labels.npy": (130, "f7e49f87bfd11f5b"),
        **{
            f"{split}_{part}.npy": (128, "4ca930d4c39dd441")
            for split in ("val", "test")
            for part in ("tokens", "labels")
        },
        **{f"{split}_offsets.npy": (136, "f6df0000bed676f0") for split in ("val", "test")},
    }


def test_the_tokens_stay_on_disk_and_cannot_be_written(tmp_path):
    tokens = open_split(make(tmp_path / "data"), "train", task="listops").tokens
    assert isinstance(tokens.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_a_folder_is_complete_or_not_there(tmp_path):
    to = tmp_path / "data"

    def interrupted():
        with new_folder(to, task="listops", settings=SETTINGS) as partial:
            for split in SPLITS:
                write_split(partial, split, TRAIN)
            assert not to.exists()
            # The state that a process killed at this point leaves.
            with pytest.raises(ValueError, match=r"partial is not prepared \(dataset.json is missing\)"):
                open_split(partial, "train", task="listops")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_is_filled_and_others_may_read_it(tmp_path):
    to = tmp_path / "data"
    to.mkdir()
    assert not holds(to, task="listops", settings=SETTINGS)
    make(to)
    assert holds(to, task="listops", settings=SETTINGS)
    (tmp_path / "plain").mkdir()
    assert to.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_the_first_of_two_at_the_same_work_wins_and_the_other_uses_it(tmp_path):
    def late(to, settings):
        with new_folder(to, task="listops", settings=SETTINGS) as partial:
            for split in SPLITS:
                write_split(partial, split, EMPTY)
            make(to, settings)

    late(tmp_path / "data", SETTINGS)
    assert open_split(tmp_path / "data", "train", task="listops").labels.size == 2
    with pytest.raises(ValueError, match="seed=1 there and 0 asked for"):
        late(tmp_path / "other", {"seed": 1, "train": 2})
    assert sorted(os.listdir(tmp_path)) == ["data", "other"]


def test_other_settings_are_named(tmp_path):
    to = make(tmp_path / "data")
    with pytest.raises(ValueError, match=r"\(seed=0 there and 1 asked for, val=None there and 3 asked for\): name an"):
        holds(to, task="listops", settings={"seed": 1, "train": 2, "val": 3})


def test_a_folder_in_other_use_raises(tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match=r"is not empty and holds no data set \(dataset.json is missing, letter.txt"):
        holds(tmp_path, task="listops", settings=SETTINGS)
    for to in (tmp_path / "letter.txt", tmp_path / "letter.txt" / "data"):
        with pytest.raises(ValueError, match="is a file or inside one: name a folder"):
            holds(to, task="listops", settings=SETTINGS)
    assert (tmp_path / "letter.txt").read_text() == "dear"


def test_a_folder_that_cannot_be_read_raises(tmp_path, monkeypatch):
    def fail(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", fail)
    with pytest.raises(ValueError, match=r"data cannot be read \(Permission denied\)"):
        holds(tmp_path / "data", task="listops", settings=SETTINGS)


def test_a_place_that_cannot_be_written_raises_on_entry(tmp_path):
    (tmp_path / "file").touch()
    # /proc takes no folders, not even from root.
    for to in (tmp_path / "file" / "data", Path("/proc/data")):
        with (
            pytest.raises(ValueError, match=f"{to} cannot be made .*: name a folder inside one you may write to"),
            new_folder(to, task="listops", settings=SETTINGS),
        ):
            pytest.fail("the work began")


def test_the_current_folder_and_mounts_raise_on_entry(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for to in (tmp_path, Path("/")):
        with (
            pytest.raises(ValueError, match="mount point, the current folder or one around it"),
            new_folder(to, task="listops", settings=SETTINGS),
        ):
            pytest.fail("the work began")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("name", ["train_tokens.npy", "test_labels.npy", HEADER])
def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path, name, request):
    if name == HEADER:
        request.getfixturevalue("no_space")
    with (  # noqa: PT012
        pytest.raises(OSError, match=r"data cannot be written \(No space left on device\): free space, or name"),
        new_folder(tmp_path / "data", task="listops", settings=SETTINGS) as partial,
    ):
        # Writing to /dev/full fails as on a full disk.
        (partial / name).symlink_to("/dev/full")
        for split in SPLITS:
            write_split(partial, split, TRAIN)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (HEADER, b"", r"dataset.json is not valid JSON"),
        (HEADER, b'{"format": "nystrom-tok', r"dataset.json is not valid JSON"),
        (HEADER, b"\xff\xfe", r"dataset.json is not UTF-8"),
        (HEADER, b"[1, 2]", r"holds a list; expected a JSON object"),
        (HEADER, b'{"format": "other"}', r"is not the header of a data set in the format nystrom-tokens"),
        (HEADER, b'{"format": "nystrom-tokens", "version": 1, "task": "listops"}', r"has no proper field settings"),
        ("train_tokens.npy", b"", r"train_tokens.npy has 0 bytes instead of 132"),
        (
            "train_labels.npy",
            b"x" * 130,
            r"train_labels.npy does not begin like .* uint8 or uint16 of shape \(2,\)",
        ),
        ("train_tokens.npy", None, r"train_tokens.npy is missing"),
    ],
)
def test_a_damaged_file_is_named_on_opening(tmp_path, name, content, message):
    to = make(tmp_path / "data")
    (to / name).unlink()
    if content is not None:
        (to / name).write_bytes(content)
    way_out = r".*the prepared data are damaged.*not exist yet, with `nystrom data prepare listops --to NEW_FOLDER`"
    for open_it in (
        lambda: open_split(to, "train", task="listops"),
        lambda: holds(to, task="listops", settings=SETTINGS),
        lambda: verify(to, task="listops"),
    ):
        with pytest.raises(ValueError, match=f"({message}|has SHA-256){way_out}"):
            open_it()


def test_a_version_and_a_task_of_another_kind_are_named(tmp_path):
    to = make(tmp_path / "data")
    header = json.loads((to / HEADER).read_text())
    with pytest.raises(ValueError, match="holds the data of listops, not of text"):
        open_split(to, "train", task="text")
    (to / HEADER).write_text(json.dumps(header | {"version": 2}))
    with pytest.raises(ValueError, match="has version 2 of the format instead of 1"):
        open_split(to, "train", task="listops")


def test_objects_are_never_unpickled(tmp_path):
    to = make(tmp_path / "data")
    path = to / "train_labels.npy"
    np.save(path, np.array([print, len], dtype=object), allow_pickle=True)
    header = json.loads((to / HEADER).read_text())
    header["files"][path.name]["bytes"] = path.stat().st_size
    (to / HEADER).write_text(json.dumps(header))
    with pytest.raises(ValueError, match="does not begin like an array of uint8"):
        open_split(to, "train", task="listops")


def test_an_unknown_split_raises(tmp_path):
    with pytest.raises(ValueError, match="split is 'dev'; expected one of train, val, test"):
        open_split(make(tmp_path / "data"), "dev", task="listops")


MEMBERS = np.array([[0, 1], [1, 1], [1, 0]])


def make_pairs(to, members=MEMBERS):
    # Three samples of two sequences.
    samples = TRAIN._replace(labels=np.array([1, 0, 1], dtype=np.uint8))
    none = np.zeros((0, 2), dtype=np.int64)
    with new_folder(to, task="pairs", settings=SETTINGS) as partial:
        for split in SPLITS:
            write_split(partial, split, samples if split == "train" else EMPTY, members if split == "train" else none)
    return to


def test_samples_may_be_made_of_several_sequences(tmp_path):
    to = make_pairs(tmp_path / "data")
    assert open_split(to, "train", task="pairs").offsets.tolist() == [0, 3, 4]
    np.testing.assert_array_equal(open_members(to, "train", task="pairs"), MEMBERS)
    assert open_members(to, "val", task="pairs").shape == (0, 2)
    verify(to, task="pairs")
    counted = json.loads((to / HEADER).read_text())["splits"]["train"]
    assert (counted["samples"], counted["sequences"], counted["sequences_per_sample"]) == (3, 2, 2)


@pytest.mark.parametrize(
    ("part", "array", "message"),
    [
        (
            "labels",
            np.array([[1, 0, 1]], dtype=np.uint8),
            r"does not begin .* uint8 or uint16 of shape \(3,\)",
        ),
        ("tokens", np.array([3, 1, 2, 5], dtype=np.int8), r"does not begin like an array of uint8 or uint16 or uint32"),
        ("offsets", np.array([0, 5, 4]), "does not rise from 0 to 4"),
        ("offsets", np.array([0, 3, 5]), "does not rise from 0 to 4"),
        ("offsets", np.array([1, 3, 4]), "does not rise from 0 to 4"),
        ("members", MEMBERS + 1, "names others than the 2 sequences"),
        ("members", MEMBERS - 1, "names others than the 2 sequences"),
        ("members", MEMBERS.reshape(2, 3), r"does not begin like an array of int64 of shape \(3, 2\)"),
        ("members", MEMBERS.astype(np.float64), "does not begin like"),
        ("members", MEMBERS.astype(object), r"(does not begin like|has \d+ bytes)"),
        ("members", None, "is missing"),
    ],
)
def test_a_file_of_wrong_content_is_named(tmp_path, part, array, message):
    path = make_pairs(tmp_path / "data") / f"train_{part}.npy"
    path.unlink()
    if array is not None:
        np.save(path, array, allow_pickle=True)
    with pytest.raises(ValueError, match=f"{path.name} {message}"):
        [open_it(path.parent, "train", task="pairs") for open_it in (open_split, open_members)]


def test_the_header_counts_classes_and_keeps_what_was_found(tmp_path):
    facts = {}
    with new_folder(tmp_path / "data", task="listops", settings=SETTINGS, facts=facts) as partial:
        for split in SPLITS:
            write_split(partial, split, gather([np.array([1], dtype=np.uint8)], [0]) if split == "val" else TRAIN)
        facts["classes"] = ["a", "b"]
    assert read_facts(tmp_path / "data", task="listops") == {"classes": ["a", "b"]}
    assert json.loads((tmp_path / "data" / HEADER).read_text())["splits"]["val"]["class_counts"] == [1, 0]
    assert read_facts(make(tmp_path / "plain"), task="listops") == {}
