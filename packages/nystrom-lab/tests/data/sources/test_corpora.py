import io
import json
import lzma
import tarfile

import pytest

from nystrom_lab.data.sources.corpora import find_corpora
from nystrom_lab.data.sources.documents import TextPiece


def read(*sources, **options):
    corpora, _ = find_corpora(sources, **options)
    return [piece for corpus in corpora for piece in corpus.pieces(False)]


def texts(*sources, **options):
    return [piece.text.decode() for piece in read(*sources, **options)]


def test_rows_are_documents(tmp_path):
    (tmp_path / "a.csv").write_text('id,Text\n1,"one\n\nmore"\n2,two\n3," "\n')
    (tmp_path / "b.tsv").write_text("content\tlabel\nthree\t1\n")
    (tmp_path / "c.jsonl.xz").write_bytes(lzma.compress(json.dumps({"text": "four"}).encode()))
    assert texts(tmp_path) == ["one\n\nmore", "two", "three", "four"]
    assert texts(tmp_path / "b.tsv", text_field="label") == ["1"]


def test_a_folder_is_read_in_the_order_of_names_with_the_folders_in_it(tmp_path):
    for name in ("b.txt", "a/c.md", "a/a.raw", ".hidden/x.txt", "a/.x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    corpora, left_out = find_corpora([tmp_path])
    assert [corpus.place.relative_to(tmp_path).as_posix() for corpus in corpora] == ["a/a.raw", "a/c.md", "b.txt"]
    assert [path.name for path in left_out] == ["picture.png"]
    assert [corpus.size for corpus in corpora] == [7, 6, 5]


def test_a_file_of_any_name_may_be_named(tmp_path):
    (tmp_path / "wiki").write_text("text\n")
    assert texts(tmp_path / "wiki") == ["text\n"]


def imdb(folder):
    for number, part in enumerate(("test/neg", "test/pos", "train/neg", "train/pos", "train/unsup")):
        (folder / part).mkdir(parents=True)
        (folder / part / f"{number}_1.txt").write_text(part)
    (folder / "README").write_text("about")
    (folder / "train" / "urls_neg.txt").write_text("address")
    return folder


def test_reviews_are_documents_and_those_without_classes_too(tmp_path):
    folder = imdb(tmp_path / "aclImdb")
    wanted = ["test/neg", "test/pos", "train/neg", "train/pos", "train/unsup"]
    assert sorted(texts(folder)) == wanted
    assert sorted(texts(tmp_path)) == wanted
    with tarfile.open(tmp_path / "aclImdb_v1.tar.gz", "w:gz") as archive:
        for path in sorted(folder.rglob("*.txt")):
            member = tarfile.TarInfo(path.relative_to(tmp_path).as_posix())
            member.size = path.stat().st_size
            archive.addfile(member, io.BytesIO(path.read_bytes()))
    assert sorted(texts(tmp_path / "aclImdb_v1.tar.gz")) == wanted


def test_every_split_of_a_saved_data_set_is_read(save_arrow, tmp_path):
    parts = {"train": {"text": ["one", "", "two"]}, "test": {"text": ["x"] * 1500}}
    assert texts(save_arrow(parts, files=2)) == ["one", "two"] + ["x"] * 1500
    assert texts(save_arrow({"text": ["one"], "title": ["t"]}, to=tmp_path / "one")) == ["one"]


def test_rows_that_are_lines_of_wikitext_make_articles(save_arrow):
    lines = ["", " = Cats = \n", "", " A <unk> . \n", "", " = = Size = = \n", "", " = Dogs = \n", "", " A dog . \n"]
    cats, dogs = read(save_arrow({"train": {"text": lines}}))
    assert cats.text.split() == b"= Cats = A <unk> . = = Size = =".split()
    assert dogs == TextPiece(b" = Dogs = \n\n A dog . \n", True, True)


def test_rows_of_parquet_are_documents(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table({"content": ["one", "two"], "label": [1, 2]}), tmp_path / "a.parquet")
    (tmp_path / "b.txt").write_text("three")
    assert texts(tmp_path) == ["one", "two", "three"]
    with pytest.raises(ValueError, match="there is no 'words' among the fields 'content', 'label'"):
        find_corpora([tmp_path], text_field="words")


def test_what_cannot_be_read_is_named_before_the_work(tmp_path, save_arrow):
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "rows.csv").write_text("words\nx\n")
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "a.txt").write_text("text")
    (tmp_path / "late" / "b.jsonl").write_text("[1]\n")
    broken = save_arrow({"train": {"text": ["a", None], "title": ["b", "c"]}})
    for sources, message in (
        ([], "--from names nothing"),
        ([tmp_path / "gone"], "gone does not exist: name files or folders of texts"),
        ([tmp_path / "empty"], "empty holds no readable texts: name files that end in .txt, "),
        ([tmp_path / "blank.txt"], "blank.txt holds no text: all files are empty or blank"),
        (
            [tmp_path / "rows.csv"],
            "rows.csv, line 1: .* among the fields 'words': name the right one with --text-field",
        ),
        ([tmp_path / "late"], r"b.jsonl, line 1: .* is not a JSON object"),
    ):
        with pytest.raises(ValueError, match=message):
            find_corpora(sources)
    with pytest.raises(ValueError, match="there is no 'words' among the fields 'text', 'title'"):
        find_corpora([broken], text_field="words")
    with pytest.raises(ValueError, match="saved, train, row 2: text is None"):
        read(broken)
