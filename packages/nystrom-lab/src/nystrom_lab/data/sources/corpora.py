"""Users' raw texts, one document after another.

    .txt .text .raw .tokens .md     plain text or WikiText, as `documents` says
    .csv .tsv .jsonl .ndjson .json  a row is a document
    .parquet                        the same, if pyarrow is installed
    aclImdb, aclImdb_v1.tar.gz      a review is a document, also those without classes
    folders of save_to_disk         a row is a document, of every split; rows that are lines of WikiText make articles

Files may be compressed. In a folder, and the folders in it, files of these names are read in the order of their names;
a file that is named itself is plain text if its name says nothing else.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from nystrom_lab.data.sources.acl_imdb import ARCHIVES, archive_source, folder_source, is_acl_imdb
from nystrom_lab.data.sources.documents import TITLE, TextPiece, pieces_of_lines, pieces_of_text, read_documents
from nystrom_lab.data.sources.parquet import SUFFIX as PARQUET
from nystrom_lab.data.sources.parquet import parquet_fields
from nystrom_lab.data.sources.row_files import Wanted, is_row_file, plain_name, read_fields
from nystrom_lab.data.sources.saved_arrow import is_saved_dataset, saved_parts
from nystrom_lab.data.sources.source import Source
from nystrom_lab.data.sources.split_files import endings

TEXT_FILES = (".txt", ".text", ".raw", ".tokens", ".md")
TEXT_FIELDS = ("text", "content", "sentence", "review")


@dataclass(frozen=True)
class Corpus:
    """A file of documents, or a folder that is one source.

    Attributes:
        place: Its location.
        paths: Its files.
        pieces: Reads it, and says how far it is if the argument is true.
    """

    place: Path
    paths: tuple[Path, ...]
    pieces: Callable[[bool], Iterator[TextPiece]]

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
    reader = _Reader({"text_field": TEXT_FIELDS if text_field is None else (text_field,)}, max_unpacked)
    for source in sources:
        reader.find(Path(source).expanduser())
    listed = ", ".join(map(str, sources))
    if not reader.corpora:
        raise ValueError(f"{listed} holds no readable texts: name files that end in {', '.join(_endings())}.")
    # All of them are looked into before the work begins.
    have_text = [_has_text(corpus) for corpus in reader.corpora]
    if not any(have_text):
        raise ValueError(f"{listed} holds no text: all files are empty or blank.")
    return reader.corpora, reader.left_out


def _has_text(corpus: Corpus) -> bool:
    return next(corpus.pieces(False), None) is not None


class _Reader:
    """Gathers corpora."""

    def __init__(self, wanted: Wanted, max_unpacked: float | None):
        self._wanted, self._max_unpacked = wanted, max_unpacked
        self.corpora: list[Corpus] = []
        self.left_out: list[Path] = []

    def find(self, path: Path) -> None:
        if path.is_dir():
            self._find_in(path)
        elif path.is_file():
            self._add_file(path)
        else:
            raise ValueError(f"{path} does not exist: name files or folders of texts.")

    def _find_in(self, folder: Path) -> None:
        if is_acl_imdb(folder):
            source = folder_source(folder, unlabelled=True)
            self._add(folder, sorted(folder.glob("t*/*/*.txt")), lambda progress: _texts(source, progress))
        elif is_saved_dataset(folder):
            paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("cache-"))
            parts = saved_parts(folder).values()
            for part in parts:
                # A column that is missing is an error before the work begins.
                part.find(self._wanted)
            self._add(
                folder,
                paths,
                lambda progress: chain.from_iterable(_saved_pieces(part.fields(self._wanted)) for part in parts),
            )
        else:
            self._find_below(folder)

    def _find_below(self, folder: Path) -> None:
        for path in sorted(folder.iterdir()):
            if path.name.startswith("."):
                continue
            if path.is_dir():
                if not path.is_symlink():
                    self._find_in(path)
            elif path.name.lower().endswith((*ARCHIVES, PARQUET)) or is_row_file(path) or is_text_file(path):
                self._add_file(path)
            else:
                self.left_out.append(path)

    def _add_file(self, path: Path) -> None:
        limit = self._max_unpacked
        if path.name.lower().endswith(ARCHIVES):
            source = archive_source(path, max_unpacked=limit, unlabelled=True)
            self._add(path, [path], lambda progress: _texts(source, progress))
        elif path.name.lower().endswith(PARQUET):
            self._add(path, [path], lambda progress: _row_pieces(parquet_fields(path, self._wanted)))
        elif is_row_file(path):
            self._add(
                path,
                [path],
                lambda progress: _row_pieces(read_fields(path, self._wanted, max_unpacked=limit, progress=progress)),
            )
        else:
            self._add(path, [path], lambda progress: read_documents(path, max_unpacked=limit, progress=progress))

    def _add(self, place: Path, paths: Sequence[Path], pieces: Callable[[bool], Iterator[TextPiece]]) -> None:
        self.corpora.append(Corpus(place, tuple(paths), pieces))


def is_text_file(path: Path) -> bool:
    """Whether a file is plain text by its name."""
    return plain_name(path).lower().endswith(TEXT_FILES)


def _texts(source: Source, progress: bool) -> Iterator[TextPiece]:
    for row in source.rows(progress):
        yield from pieces_of_text(row.texts[0])


def _row_pieces(rows: Iterable[tuple[int, Sequence[bytes]]]) -> Iterator[TextPiece]:
    for _, (text,) in rows:
        yield from pieces_of_text(text)


def _saved_pieces(fields: Iterable[tuple[int, Sequence[bytes]]]) -> Iterator[TextPiece]:
    rows = (text for _, (text,) in fields)
    before: list[bytes] = []
    for text in rows:
        before.append(text)
        if text and not text.isspace():
            break
    if before and TITLE.fullmatch(before[-1]):
        # Lines of WikiText, one a row; a blank line is an empty row.
        yield from pieces_of_lines(text or b"\n" for text in chain(before, rows))
        return
    for text in chain(before, rows):
        yield from pieces_of_text(text)


def _endings() -> list[str]:
    return [*TEXT_FILES, PARQUET, endings()]
