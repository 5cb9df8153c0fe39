"""Users' raw texts, one document after another.

    .txt .text .raw .tokens .md     plain text or WikiText, as `documents` says
    files of rows                   a row is a document; see `row_files`
    aclImdb, aclImdb_v1.tar.gz      a review is a document, also those without classes
    folders of save_to_disk         a row is a document, of every split; rows that are lines of WikiText make articles

Files may be compressed. In a folder, and the folders in it, files of these names are read in the order of their names;
a file that is named itself is plain text if its name says nothing else.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from nystrom.input_files import check_regular
from nystrom_lab.data.sources.acl_imdb import ARCHIVES, find_imdb, is_acl_imdb
from nystrom_lab.data.sources.arrow_files import (
    arrow_fields,
    files_of_saved,
    find_columns,
    is_saved_dataset,
    saved_parts,
)
from nystrom_lab.data.sources.columns import TEXTS, Wanted
from nystrom_lab.data.sources.documents import TITLE, TextPiece, pieces_of_lines, pieces_of_text, read_documents
from nystrom_lab.data.sources.row_files import endings, is_row_file, plain_name, read_fields

TEXT_FILES = (".txt", ".text", ".raw", ".tokens", ".md")


@dataclass(frozen=True)
class Corpus:
    """A file of documents, or a folder that is one source.

    Attributes:
        paths: Files of the source.
        pieces: Reads it.
    """

    paths: tuple[Path, ...]
    pieces: Callable[[], Iterator[TextPiece]]


def find_corpora(sources: Sequence[Path], *, text_field: str | None = None) -> tuple[list[Corpus], list[Path]]:
    """Recognize files and folders, and read the first document of each.

    Args:
        text_field: Column or field of the texts in files of rows. Default: one of `columns.TEXTS`.

    Returns:
        The corpora, and the files in folders whose format is not supported.

    Raises:
        ValueError: One does not exist, is not text or lacks the column, or there is no text at all.
    """
    if not sources:
        raise ValueError("--from names nothing: name files or folders of texts.")
    wanted = {"text_field": TEXTS if text_field is None else (text_field,)}
    left_out: list[Path] = []
    corpora = [corpus for source in sources for corpus in _corpora(Path(source).expanduser(), wanted, left_out)]
    listed = ", ".join(map(str, sources))
    if not corpora:
        raise ValueError(
            f"{listed} holds no readable texts: name files that end in {', '.join(TEXT_FILES)}, {endings()}."
        )
    # All of them are looked into before the work begins.
    have_text = [next(corpus.pieces(), None) is not None for corpus in corpora]
    if not any(have_text):
        raise ValueError(f"{listed} holds no text: all files are empty or blank.")
    return corpora, left_out


def _corpora(path: Path, wanted: Wanted, left_out: list[Path]) -> Iterator[Corpus]:
    check_regular(path)
    if path.is_file() and is_row_file(path):
        yield Corpus((path,), lambda: _of_texts(text for _, (text,) in read_fields(path, wanted)))
    elif not path.exists():
        raise ValueError(f"{path} does not exist: name files or folders of texts.")
    elif is_acl_imdb(path) or (path.is_file() and path.name.lower().endswith(ARCHIVES)):
        imdb = find_imdb(path, unlabelled=True)
        assert imdb is not None
        paths = (path,) if path.is_file() else tuple(sorted(path.glob("t*/*/*.txt")))
        yield Corpus(paths, lambda: _of_texts(row.texts[0] for row in imdb.rows()))
    elif path.is_file():
        yield Corpus((path,), partial(read_documents, path))
    elif is_saved_dataset(path):
        parts = saved_parts(path).values()
        for part in parts:
            # A column that is missing is an error before the work begins.
            find_columns(part, wanted)
        yield Corpus(
            tuple(files_of_saved(path)),
            lambda: chain.from_iterable(_of_saved(text for _, (text,) in arrow_fields(part, wanted)) for part in parts),
        )
    else:
        for inside in sorted(path.iterdir()):
            if inside.name.startswith(".") or (inside.is_dir() and inside.is_symlink()):
                continue
            is_text = plain_name(inside).lower().endswith(TEXT_FILES) or inside.name.lower().endswith(ARCHIVES)
            if inside.is_dir() or is_row_file(inside) or is_text:
                yield from _corpora(inside, wanted, left_out)
            else:
                left_out.append(inside)


def _of_texts(texts: Iterator[bytes]) -> Iterator[TextPiece]:
    return chain.from_iterable(map(pieces_of_text, texts))


def _of_saved(texts: Iterator[bytes]) -> Iterator[TextPiece]:
    before: list[bytes] = []
    for text in texts:
        before.append(text)
        if text and not text.isspace():
            break
    if before and TITLE.fullmatch(before[-1]):
        # Lines of WikiText, one a row; a blank line is an empty row.
        return pieces_of_lines(text or b"\n" for text in chain(before, texts))
    return _of_texts(chain(before, texts))
