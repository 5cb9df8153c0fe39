import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nystrom_lab.data.sources.documents import PIECE, TextPiece, pieces_of_lines, pieces_of_text, read_documents

WIKI = b" \n = Cats = \n \n A cat . \n \n = = Size = = \n \n <unk> small . \n \n = Dogs = \n \n A dog = pet . \n"


def read(path, content):
    path.write_bytes(content)
    return [*read_documents(path)]


def test_an_article_of_wikitext_begins_with_its_title_and_holds_blank_lines(tmp_path):
    cats, dogs = read(tmp_path / "wiki.tokens", WIKI)
    assert cats.text.split() == b"= Cats = A cat . = = Size = = <unk> small .".split()
    assert dogs.text.split() == b"= Dogs = A dog = pet .".split()
    assert cats.wikitext
    assert dogs.wikitext
    (tmp_path / "wiki.gz").write_bytes(gzip.compress(WIKI))
    assert [*read_documents(tmp_path / "wiki.gz")] == [cats, dogs]


def test_a_title_inside_plain_text_is_a_line_like_any_other(tmp_path):
    (piece,) = read(tmp_path / "a.txt", b"first\n = Title = \nlast\n")
    assert not piece.wikitext


@pytest.mark.parametrize("content", [b"word " * 500_000, b"word\n" * 500_000, "\u00fc\u4e2d".encode() * 500_000])
def test_a_long_document_comes_in_pieces_of_whole_words_or_letters(tmp_path, content):
    pieces = read(tmp_path / "a.txt", content)
    assert b"".join(piece.text for piece in pieces) == content
    assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    for piece in pieces:
        assert 0 < len(piece.text) < 2 * PIECE
        piece.text.decode()
        assert {*piece.text.split()} <= {b"word"} or piece.text[:1] > b"\x7f"
    whole = [*pieces_of_text(content)]
    assert len(whole) > 1
    assert b"".join(piece.text for piece in whole) == content


@pytest.mark.long
@given(st.lists(st.text(max_size=8), max_size=8))
def test_nothing_but_blank_lines_is_lost(lines):
    content = [line.replace("\n", " ").encode() + b"\n" for line in lines]
    wanted = b"".join(line for line in content if not line.isspace())
    found = b"".join(piece.text for piece in pieces_of_lines(content))
    assert found.split() == wanted.split()


def test_a_letter_that_is_cut_by_the_check_is_no_mistake(tmp_path):
    content = b"x" * ((1 << 16) - 1) + "\u00fc".encode()
    assert read(tmp_path / "a.txt", content) == [TextPiece(content)]
    with pytest.raises(ValueError, match="cannot be unpacked"):
        read(tmp_path / "a.txt.gz", gzip.compress(content)[:-4])
