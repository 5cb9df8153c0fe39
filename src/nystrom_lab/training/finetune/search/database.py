"""The database of a search: what is wrong with it in one line, before it is used where that can be seen."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path


@contextmanager
def intact(file: Path) -> Iterator[None]:
    """Work on the database of a search.

    Args:
        file: Where it is, or will be.

    Raises:
        ValueError: It is damaged, or cannot be written.
    """
    import optuna
    import sqlalchemy.exc

    try:
        _check(file)
        yield
    except (sqlite3.Error, sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        cause: BaseException = error
        while not isinstance(cause, sqlite3.Error) and cause.__cause__ is not None:
            cause = cause.__cause__
        raise ValueError(
            f"{file} cannot be read or written ({str(cause).splitlines()[0]}): make room if the disk is full; if it is "
            "damaged, delete it and start the same command again with --resume, which trains no trial that was trained."
        ) from error


def _check(file: Path) -> None:
    """Raise DatabaseError for a file whose pages do not hold together."""
    if file.is_file():
        with closing(sqlite3.connect(file)) as database:
            sound = database.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",)
        if not sound:
            raise sqlite3.DatabaseError("its pages do not hold together")
