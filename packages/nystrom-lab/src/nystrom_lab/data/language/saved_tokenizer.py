"""Save a tokenizer in a form that AutoTokenizer loads."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write the files of a tokenizer into a folder.

    Raises:
        OSError: They cannot be written.
    """
    try:
        tokenizer.save_pretrained(str(folder))
    except Exception as error:
        # The package tokenizers raises an Exception with the number of the error in its text.
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
