"""Users' raw texts, one document after another.

    .txt .text .raw .tokens .md     plain text or WikiText, as `documents` says
    files of rows                   a row is a document; see `row_files`
    aclImdb, aclImdb_v1.tar.gz      a review is a document, also those without classes
    folders of save_to_disk         a row is a document, of every split; rows that are lines of WikiText make articles

Files may be compressed. In a folder, and the folders in it, files of these names are read in the order of their names;
a file that is named itself is plain text if its name says nothing else.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from nystrom_lab.data.sources.acl_imdb import ARCHIVES, archive_source, folder_source, is_acl_imdb
from nystrom_lab.data.sources.arrow_files import (
    SavedPart,
    arrow_fields,
    files_of_saved,
    find_columns,
    is_saved_dataset,
    saved_parts,
)
from nystrom_lab.data.sources.documents import TITLE, TextPiece, pieces_of_lines, pieces_of_text, read_documents
from nystrom_lab.data.sources.row_files import endings, is_row_file, plain_name, read_fields
from nystrom_lab.data.sources.source import Source, Wanted

TEXT_FILES = (".txt", ".text", ".raw", ".tokens", ".md")
TEXT_FIELDS = ("text", "content", "sentence", "review")

# Reads documents, and says how far it is if the argument is true.
PiecesReader = Callable[[bool], Iterator[TextPiece]]


@dataclass(frozen=True)
class Corpus:
    """A file of documents, or a folder that is one source.

    Attributes:
        place: Its location.
        paths: Its files.
        pieces: Reads it.
    """

    place: Path
    paths: tuple[Path, ...]
    pieces: PiecesReader

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(path.stat().st_size for path in self.paths)


def find_corpora(
    sources: Sequence[Path], *, text_field: str | None = None, max_unpacked: float | None = None
) -> tuple[list[Corpus], list[Path]]:
    """Recognize files and folders, and read the first document of each.

    Args:
        sources: Files and folders.
        text_field: Column or field of the texts in files of rows. Default: one of `TEXT_FIELDS`.
        max_unpacked: Limit on the unpacked size of a compressed file, in gigabytes; see `unpacking`.

    Returns:
        The corpora, and the files in folders whose format is not supported.

    Raises:
        ValueError: One does not exist, is not text or lacks the column, or there is no text at all.
    """
    if not sources:
        raise ValueError("--from names nothing: name files or folders of texts.")
    wanted = {"text_field": TEXT_FIELDS if text_field is None else (text_field,)}
    left_out: list[Path] = []
    paths = [Path(source).expanduser() for source in sources]
    corpora = [corpus for path in paths for corpus in _corpora(path, wanted, max_unpacked, left_out)]
    listed = ", ".join(map(str, sources))
    if not corpora:
        raise ValueError(
            f"{listed} holds no readable texts: name files that end in {', '.join(TEXT_FILES)}, {endings()}."
        )
    # All of them are looked into before the work begins.
    have_text = [next(corpus.pieces(False), None) is not None for corpus in corpora]
    if not any(have_text):
        raise ValueError(f"{listed} holds no text: all files are empty or blank.")
    return corpora, left_out


def _corpora(path: Path, wanted: Wanted, limit: float | None, left_out: list[Path]) -> Iterator[Corpus]:
    if path.is_file():
        yield Corpus(path, (path,), _pieces_of_file(path, wanted, limit))
    elif not path.is_dir():
        raise ValueError(f"{path} does not exist: name files or folders of texts.")
    elif is_acl_imdb(path):
        reviews = partial(_texts, folder_source(path, unlabelled=True))
        yield Corpus(path, tuple(sorted(path.glob("t*/*/*.txt"))), reviews)
    elif is_saved_dataset(path):
        parts = saved_parts(path).values()
        for part in parts:
            # A column that is missing is an error before the work begins.
            find_columns(part, wanted)
        yield Corpus(path, tuple(files_of_saved(path)), lambda _: _saved_pieces(parts, wanted))
    else:
        for inside in sorted(path.iterdir()):
            if inside.name.startswith(".") or (inside.is_dir() and inside.is_symlink()):
                continue
            is_text = plain_name(inside).lower().endswith(TEXT_FILES) or inside.name.lower().endswith(ARCHIVES)
            if inside.is_dir() or is_row_file(inside) or is_text:
                yield from _corpora(inside, wanted, limit, left_out)
            else:
                left_out.append(inside)


def _pieces_of_file(path: Path, wanted: Wanted, limit: float | None) -> PiecesReader:
    if path.name.lower().endswith(ARCHIVES):
        return partial(_texts, archive_source(path, max_unpacked=limit, unlabelled=True))
    if is_row_file(path):
        return lambda progress: _row_pieces(read_fields(path, wanted, max_unpacked=limit, progress=progress))
    return lambda progress: read_documents(path, max_unpacked=limit, progress=progress)


def _texts(source: Source, progress: bool) -> Iterator[TextPiece]:
    for row in source.rows(progress):
        yield from pieces_of_text(row.texts[0])


def _row_pieces(rows: Iterable[tuple[int, Sequence[bytes]]]) -> Iterator[TextPiece]:
    for _, (text,) in rows:
        yield from pieces_of_text(text)


def _saved_pieces(parts: Iterable[SavedPart], wanted: Wanted) -> Iterator[TextPiece]:
    for part in parts:
        rows = (text for _, (text,) in arrow_fields(part, wanted))
        before: list[bytes] = []
        for text in rows:
            before.append(text)
            if text and not text.isspace():
                break
        if before and TITLE.fullmatch(before[-1]):
            # Lines of WikiText, one a row; a blank line is an empty row.
            yield from pieces_of_lines(text or b"\n" for text in chain(before, rows))
        else:
            yield from chain.from_iterable(map(pieces_of_text, chain(before, rows)))
