"""Things that users may do with a prepared folder: name raw data instead, damage it, kill its preparation."""

import contextlib
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from nystrom_lab.cli.main import main
from nystrom_lab.data.lra.image import Image
from nystrom_lab.data.lra.listops.task import ListOps, prepare_listops
from nystrom_lab.data.lra.pathfinder.task import Pathfinder
from nystrom_lab.data.lra.texts.retrieval import Retrieval, prepare_retrieval
from nystrom_lab.data.lra.texts.reviews import Text
from nystrom_lab.data.store.prepared_folder import holds, new_folder
from nystrom_lab.data.store.token_files import HEADER, SPLITS, gather, open_split, write_split

KILLED = """
import os, signal, sys
from pathlib import Path
from nystrom_lab.data.store.prepared_folder import new_folder
with new_folder(Path(sys.argv[1]), task="listops", settings={}) as partial:
    (partial / "train_tokens.npy").write_bytes(b"half")
    print(partial.name, flush=True)
    if sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
"""


def start(to, how):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(to), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, process.stdout.readline().strip()


def make(to):
    with new_folder(to, task="listops", settings={}) as partial:
        for split in SPLITS:
            write_split(partial, split, gather([np.array([1], dtype=np.uint8)], [0]))
    return to


@pytest.fixture
def listops(tmp_path):
    return prepare_listops(tmp_path / "data", train=20, val=5, test=5, min_length=5, max_length=40, workers=1)


@pytest.fixture
def pairs(tmp_path):
    rows = "".join(f"a{i % 7}\tb{i}\tc{i % 2}\n" for i in range(50))
    (tmp_path / "a.tsv").write_text("text1\ttext2\tlabel\n" + rows)
    return prepare_retrieval(tmp_path / "a.tsv", tmp_path / "pairs")


@pytest.mark.parametrize("split", [ListOps, Text, Retrieval, Image, Pathfinder])
def test_raw_data_in_place_of_prepared_data_are_never_to_be_deleted(tmp_path, split):
    (tmp_path / "my letters").mkdir()
    (tmp_path / "my letters" / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="is not prepared") as caught:
        split(tmp_path / "my letters", "train")
    command = f"`nystrom data prepare {split.task} --from {tmp_path / 'my letters'} --to data/{split.task}`"
    assert command in str(caught.value)
    with pytest.raises(ValueError, match="is not empty and holds no data set") as taken:
        holds(tmp_path / "my letters", task=split.task, settings={})
    for error in (caught, taken):
        assert not any(word in str(error.value) for word in ("delete", "remove", "empty this"))


def test_what_a_killed_preparation_left_is_removed_by_the_next(tmp_path):
    for _ in range(2):
        process, partial = start(tmp_path / "data", "die")
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert (tmp_path / partial / "train_tokens.npy").exists()
    # Only the leftovers of this folder, and only those with the marks of this library.
    mine = [".data.01234567.partial", ".data2.01234567.partial", ".data.mine.partial"]
    for name in mine:
        (tmp_path / name).mkdir()
    (tmp_path / ".data2.01234567.partial.lock").touch()
    make(tmp_path / "data")
    assert sorted(os.listdir(tmp_path)) == sorted(["data", ".data2.01234567.partial.lock", *mine])


def test_a_preparation_at_work_keeps_its_folder(tmp_path):
    process, partial = start(tmp_path / "data", "wait")
    try:
        make(tmp_path / "data")
        assert (tmp_path / partial / "train_tokens.npy").exists()
    finally:
        process.kill()
        process.communicate()


def test_no_byte_of_the_files_can_crash_the_opening(listops, pairs):
    opened = 0
    for folder, split in ((listops, ListOps), (pairs, Retrieval)):
        for path in sorted(folder.iterdir()):
            content = path.read_bytes()
            # The headers byte by byte, and some of what follows.
            places = [*range(0, min(len(content), 160), 3), *range(160, len(content), 61)]
            for place in places:
                path.write_bytes(content[:place] + bytes([content[place] ^ 0x15]) + content[place + 1 :])
                # Any other error would end the test.
                with contextlib.suppress(ValueError):
                    opened += len(list(split(folder, "train"))) > 0
            path.write_bytes(content)
    # A byte of another split, or of a text, is found by `verify`.
    assert opened


def test_a_token_and_a_label_that_no_model_knows_are_found_on_opening(listops):
    tokens = listops / "train_tokens.npy"
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-1] + b"\xff")
    with pytest.raises(ValueError, match=r"train_tokens.npy holds the token 255, and there are 17: .*damaged"):
        ListOps(listops, "train")
    tokens.write_bytes(content)
    labels = listops / "train_labels.npy"
    labels.write_bytes(labels.read_bytes()[:-1] + b"\x0a")
    with pytest.raises(ValueError, match=r"train_labels.npy has classes of .* samples instead of"):
        open_split(listops, "train", task="listops")


def test_the_command_verifies_every_file_and_continues_after_a_damaged_one(pairs, capsys):
    assert main(["data", "verify", str(pairs)]) == 0
    names = sorted(path.name for path in pairs.iterdir() if path.name != HEADER)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [[name, "ok"] for name in names]
    damaged = pairs / "test_tokens.npy"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    (pairs / "val_labels.npy").unlink()
    assert main(["data", "verify", str(pairs)]) == 2
    printed = capsys.readouterr()
    lines = dict(line.split(maxsplit=1) for line in printed.out.splitlines())
    assert [name for name, rest in lines.items() if rest != "ok"] == ["test_tokens.npy", "val_labels.npy"]
    assert lines["val_labels.npy"] == "is missing"
    (line,) = printed.err.splitlines()
    assert "test_tokens.npy has SHA-256" in line
    assert "`nystrom data prepare retrieval --from FILES --to NEW_FOLDER`" in line
