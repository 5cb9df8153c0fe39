"""Blocks, made in one go or several."""

from dataclasses import replace

import numpy as np
import pytest

from nystrom_lab.data.language.mlm_sop.tokenising import (
    BlockPlan,
    is_held_out,
    kept_folder,
    read_block,
    tokenise,
    write_block,
)
from nystrom_lab.data.sources.corpora import Corpus, find_corpora
from nystrom_lab.data.sources.documents import PIECE, TextPiece, pieces_of_lines

SETTINGS = {"seed": 0}


@pytest.fixture(scope="module")
def plan(words):
    tokenizer = (words / "tokenizer.json").read_text()
    return BlockPlan(tokenizer, unknown=1, dtype=np.uint16, min_tokens=16, held_out=0.3, seed=0)


@pytest.fixture
def corpora(tmp_path, sentences):
    """Five files of eight documents each."""
    for number in range(5):
        documents = [sentences(6 + i, 10 * number + i) for i in range(8)]
        (tmp_path / f"{number}.txt").write_text("\n\n".join(documents))
    return find_corpora([tmp_path])[0]


def content(blocks):
    return [[part.tolist() for part in read_block(path, "tokens", "lengths", "held_out", "counts")] for path in blocks]


def make(corpora, kept, plan):
    kept.mkdir(exist_ok=True)
    blocks = tokenise(corpora, kept, plan, block_size=800)
    assert [path.name for path in blocks] == sorted(path.name for path in kept.glob("*.npz"))
    return content(blocks)


class Interrupted(Exception):
    pass


def breaking(corpus, after):
    """A corpus that breaks off after so many documents."""

    def pieces():
        for number, piece in enumerate(corpus.pieces()):
            if number == after:
                break
            yield piece
        raise Interrupted

    return replace(corpus, pieces=pieces)


@pytest.mark.parametrize(("which", "after"), [(0, 7), (1, 0), (1, 3), (2, 5), (4, 4), (4, 8)])
def test_what_is_finished_is_kept_and_nothing_of_it_made_again(tmp_path, corpora, plan, which, after):
    whole = make(corpora, tmp_path / "whole", plan)
    broken = [*corpora[:which], breaking(corpora[which], after), *corpora[which + 1 :]]
    with pytest.raises(Interrupted):
        make(broken, tmp_path / "kept", plan)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").iterdir()}
    assert sum(path.suffix == ".npz" for path in times) > 0
    assert make(corpora, tmp_path / "kept", plan) == whole
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_a_damaged_block_is_made_again(tmp_path, corpora, plan):
    whole = make(corpora, tmp_path / "kept", plan)
    path = sorted((tmp_path / "kept").glob("*.npz"))[2]
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(OSError, match=r"was damaged .* and is removed: run the same command again"):
        read_block(path, "tokens")
    assert make(corpora, tmp_path / "kept", plan) == whole


def test_the_pieces_of_a_long_document_are_on_one_side(tmp_path, plan, sentences):
    pieces = [TextPiece(sentences(9, i).encode(), begins=i % 10 == 0) for i in range(100)]
    corpus = Corpus((), lambda: iter(pieces))
    held = np.concatenate([block[2] for block in make([corpus], tmp_path / "kept", plan)]).reshape(10, 10)
    assert (held == held[:, :1]).all()
    assert 0 < held[:, 0].sum() < 10


def test_a_full_disk_leaves_no_block_under_its_name(tmp_path, plan, sentences, no_space):
    with pytest.raises(OSError, match="No space left"):
        write_block(tmp_path / "block.npz", [(TextPiece(sentences(4000).encode()), False)], plan)
    assert not list(tmp_path.iterdir())


BLOCK = "000000.npz"


def test_the_kept_folder_outlives_an_error_and_is_removed_at_the_end(tmp_path, capsys):
    to = tmp_path / "to"

    def interrupted(settings, name, error=Interrupted):
        def work():
            with kept_folder(to, settings) as kept:
                folders.append(kept)
                (kept / name).touch()
                raise error

        folders = []
        with pytest.raises(error):
            work()
        return folders[0]

    kept = interrupted(SETTINGS, BLOCK)
    assert f"finished work is kept in {kept}; the same command continues" in capsys.readouterr().err
    other = interrupted({"seed": 1}, BLOCK)
    assert other != kept
    # Without a finished block there is nothing to keep, and a mistake would be made again.
    assert not interrupted({"seed": 2}, f".{BLOCK}.01234567.partial").exists()
    assert not interrupted({"seed": 3}, BLOCK, ValueError).exists()
    capsys.readouterr()
    with kept_folder(to, SETTINGS) as again:
        assert again == kept
        assert (again / BLOCK).exists()
        with pytest.raises(ValueError, match="to is being made by another process"), kept_folder(to, SETTINGS):
            pass
    assert [*tmp_path.iterdir()] == []
    assert capsys.readouterr().err == ""


def test_only_blocks_are_removed_from_the_kept_folder_and_nothing_is_written_through_a_link(tmp_path):
    with kept_folder(tmp_path / "to", SETTINGS) as kept:
        (kept / BLOCK).touch()
        (kept / "notes.txt").write_text("mine")
    assert [path.name for path in kept.iterdir()] == ["notes.txt"]
    kept.rename(tmp_path / "mine")
    kept.symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match="is a symbolic link"), kept_folder(tmp_path / "to", SETTINGS):
        pass
    assert kept.is_symlink()


@pytest.mark.long
def test_equal_documents_are_on_one_side_wherever_they_stand(tmp_path, plan):
    sides = []
    for number in range(100):
        document = f"document {number} of some words"
        content = f"{document}\n\n{document}\r\n \n\n{document}".encode()
        pieces = [*pieces_of_lines(content.splitlines(keepends=True))]
        assert len(pieces) == 3
        sides.append({is_held_out(piece.text, plan) for piece in pieces})
    assert all(len(side) == 1 for side in sides)
    assert 0 < sum(True in side for side in sides) < 100
    # A long one too, whose first piece ends elsewhere after a blank line.
    for number in range(20):
        long = f"{number} " * (PIECE // 2)
        first, after = (next(pieces_of_lines([start + long.encode()])) for start in (b"", b"\n\n "))
        assert len(first.text) >= PIECE // 2
        assert is_held_out(first.text, plan) == is_held_out(after.text, plan)
