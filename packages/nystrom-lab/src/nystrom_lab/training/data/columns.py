"""The columns of texts and labels in a user's own files."""

from typing import NamedTuple


class Columns(NamedTuple):
    """Columns, or fields, of a user's own files; None means the usual names.

    Attributes:
        text_field: Column of the texts, or of the first text of each pair.
        label_field: Column of the labels.
        pair_field: Column of the second text of each pair.
    """

    text_field: str | None = None
    label_field: str | None = None
    pair_field: str | None = None

    def named(self) -> dict[str, str]:
        """The columns that were given."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def check_unused(self, why: str) -> None:
        """Check that none was given.

        Raises:
            ValueError: One was.
        """
        for name, value in self.named().items():
            raise ValueError(f"--{name.replace('_', '-')} is {value!r}, but {why}: leave it out.")


NO_COLUMNS = Columns()
