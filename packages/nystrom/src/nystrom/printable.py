"""Text that is safe to print: a name of a file may hold the sequences by which a terminal is controlled."""

import re

# All except tab and line end, and the halves of characters by which Python holds bytes that are not UTF-8.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with each control character written as an escape, such as \x1b."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
