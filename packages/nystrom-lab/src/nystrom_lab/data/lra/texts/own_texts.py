"""A user's own labelled texts, or pairs of them, prepared with the defaults in a folder named after their content."""

import hashlib
import json
from pathlib import Path

from nystrom_lab.data.lra.texts import retrieval, reviews
from nystrom_lab.data.lra.texts.labelled_texts import HeldOut, prepare_texts
from nystrom_lab.data.lra.texts.linked_documents import find_linked
from nystrom_lab.data.sources.columns import own_columns


def prepare_own(
    task: str,
    files: Path,
    *,
    under: Path = Path("data"),
    max_length: int = 4000,
    text_field: str | None = None,
    label_field: str | None = None,
    pair_field: str | None = None,
) -> Path:
    """Prepare labelled texts, or pairs of them, under a folder; arguments as in `prepare_text` and `prepare_retrieval`.

    Returns:
        The folder; the same for the same content and fields, so it is created once.

    Raises:
        ValueError: Missing texts, documents and links instead of pairs, a missing field, or `pair_field` for single
            texts.
    """
    files = Path(files).expanduser()
    if task == reviews.TASK:
        if pair_field is not None:
            raise ValueError(
                f"--pair-field is {pair_field!r}, but a sample of {task} is one text: leave it out, or train"
                f" {retrieval.TASK}."
            )
        columns = own_columns(pairs=False, label_field=label_field, text_field=text_field)
        source = reviews.find_texts(files, columns)
    else:
        if files.is_dir() and (linked := find_linked(files)) is not None:
            raise ValueError(
                f"{files} holds documents and links ({linked.documents.name}, {linked.links.name}), which are prepared "
                f"first: nystrom data prepare {task} --from {files} --to data/{task}, then train with --data "
                f"data/{task}."
            )
        columns = own_columns(pairs=True, label_field=label_field, text_field=text_field, pair_field=pair_field)
        source = retrieval.find_pairs(files, columns)
    content = json.dumps([source.kind, dict(source.settings())], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    return prepare_texts(
        source,
        Path(under) / f"{task}-{files.name.split('.')[0]}-{digest}-{max_length}",
        task=task,
        texts=1 if task == reviews.TASK else 2,
        max_length=max_length,
        held_out=HeldOut(),
        skip_empty=False,
        check_counts=True,
    )
