"""Documents for masked words and sentence order: raw texts as tokens, split by document.

A prepared folder is one of `store`: its samples are documents, without a label of their own. A fifth of them is held
out as val, as in the paper; test is empty. The files of the tokenizer are beside the tokens, so that the folder is also
one that AutoTokenizer loads, and the header says which tokens are special.

Source: Xiong et al. (2021), arXiv:2102.03902, section 5.1.
"""

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nystrom.checks import check_at_least
from nystrom.progress import Progress
from nystrom.sums import sha256
from nystrom_lab.data.language.mlm_sop.tokenising import BlockPlan, kept_folder, read_block, tokenise
from nystrom_lab.data.language.mlm_sop.vocabulary import Vocabulary, open_tokenizer, read_vocabulary
from nystrom_lab.data.language.tokenizer import save_tokenizer
from nystrom_lab.data.sources.corpora import Corpus, find_corpora
from nystrom_lab.data.sources.held_out import check_any_seed, check_share
from nystrom_lab.data.store.prepared_folder import holds, new_folder
from nystrom_lab.data.store.token_files import SPLITS, write_pieces
from nystrom_lab.measure.rows import cores

TASK = "mlm-sop"
SHORTEST = 8


def prepare_mlm_sop(
    source: list[Path],
    to: Path,
    *,
    tokenizer: Path,
    length: int = 512,
    held_out: float = 0.2,
    min_tokens: int = 16,
    text_field: str | None = None,
    seed: int = 0,
    workers: int | None = None,
) -> Path:
    """Prepare raw texts for pretraining on masked words and sentence order.

    The same command continues an interrupted run.

    Args:
        source: Files or folders: plain text, where a blank line ends a document; WikiText; aclImdb or its archive;
            .csv, .tsv, .jsonl and .parquet files, where a row is a document; folders saved by Hugging Face datasets.
            Files may be compressed (.gz, .xz, .bz2, .zst, .lz4).
        to: Folder to create. If it already holds this data set, it is reused.
        tokenizer: Folder of a tokenizer with the tokens [CLS], [SEP], [MASK] and [PAD], such as that of a BERT.
        length: Maximum number of tokens per instance, unless training sets another.
        held_out: Share of the documents to hold out for validation.
        min_tokens: Documents with fewer tokens are skipped and counted.
        text_field: Column or field of the texts. Default: text, content, sentence or review.
        seed: Decides which documents are held out.
        workers: Threads that tokenise; all cores if not given. They do not change the result.

    Returns:
        The folder, ready for `MlmSop`.

    Raises:
        ValueError: A source is missing, broken or without texts, the tokenizer lacks a token, a setting is impossible,
            no document is long enough, or `to` is in use or cannot be written.
    """
    to = Path(to).expanduser().resolve()
    for name, value, least in (
        ("length", length, SHORTEST),
        # One for each segment.
        ("min-tokens", min_tokens, 2),
        ("workers", cores() if workers is None else workers, 1),
    ):
        check_at_least(f"--{name}", value, least)
    check_share("--held-out", held_out)
    check_any_seed(seed)
    opened = open_tokenizer(tokenizer)
    corpora, left_out = find_corpora(source, text_field=text_field)
    backend = opened.backend_tokenizer.to_str()  # type: ignore[attr-defined]
    settings = {
        "source_sha256": _digest(corpora),
        "tokenizer_sha256": hashlib.sha256(backend.encode()).hexdigest(),
        "length": length,
        "held_out": held_out,
        "min_tokens": min_tokens,
        "text_field": text_field or "",
        "seed": seed,
    }
    if holds(to, task=TASK, settings=settings):
        return to
    vocabulary = read_vocabulary(opened)
    unknown = None if opened.unk_token_id is None else int(opened.unk_token_id)  # type: ignore[arg-type]
    plan = BlockPlan(backend, unknown, vocabulary.dtype, min_tokens, held_out, seed)
    # The package tokenizers reads both when it makes its threads.
    os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(workers or cores())}
    facts: dict[str, Any] = {}
    with (
        kept_folder(to, settings) as kept,
        new_folder(to, task=TASK, settings=settings, facts=facts) as partial,
    ):
        blocks = tokenise(corpora, kept, plan)
        facts |= _assemble(partial, blocks, plan, vocabulary)
        facts["files_left_out"] = len(left_out)
        save_tokenizer(opened, partial)
    _summarize(to, facts, left_out)
    return to


def _digest(corpora: Sequence[Corpus]) -> str:
    """Hash the content of all files, in order."""
    paths = [path for corpus in corpora for path in corpus.paths]
    digest = hashlib.sha256()
    for path in Progress("checksums", len(paths), unit="files").over(paths):
        digest.update(f"{sha256(path)}\n".encode())
    return digest.hexdigest()


def _assemble(folder: Path, blocks: Sequence[Path], plan: BlockPlan, vocabulary: Vocabulary) -> dict[str, Any]:
    """Write the splits from the blocks, and return the facts for the header."""
    read = [read_block(path, "lengths", "held_out", "counts") for path in blocks]
    lengths = np.concatenate([lengths for lengths, _, _ in read])
    held_out = np.concatenate([held_out for _, held_out, _ in read])
    short, broken, size = np.sum([counts for _, _, counts in read], axis=0).tolist()
    if not lengths.size:
        raise ValueError(f"none of the {short} documents has {plan.min_tokens} tokens: lower --min-tokens.")
    chosen = {"train": ~held_out, "val": held_out, "test": np.zeros(held_out.shape, dtype=bool)}
    for split in ("train", "val"):
        if not chosen[split].any():
            raise ValueError(
                f"{split} gets none of the {lengths.size} documents: add documents, or use another --held-out than"
                f" {plan.held_out} or another --seed than {plan.seed}."
            )
    for split in SPLITS:
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), lengths[chosen[split]].cumsum()])
        labels = np.zeros(offsets.size - 1, dtype=np.uint8)
        tokens = _tokens(blocks, held_out=split == "val") if labels.size else iter(())
        write_pieces(folder, split, tokens, offsets, labels, dtype=plan.dtype)
    return {
        "vocabulary": asdict(vocabulary),
        "documents": int(lengths.size),
        "documents_too_short": short,
        "documents_not_utf_8": broken,
        "bytes_of_text": size,
    }


def _tokens(blocks: Sequence[Path], *, held_out: bool) -> Iterator[NDArray[np.unsignedinteger]]:
    for path in blocks:
        tokens, lengths, is_held = read_block(path, "tokens", "lengths", "held_out")
        yield tokens[np.repeat(is_held == held_out, lengths)]


def _summarize(to: Path, facts: dict[str, Any], left_out: Sequence[Path]) -> None:
    said = [f"{facts['documents']} documents"]
    if short := facts["documents_too_short"]:
        said.append(f"{short} with fewer tokens than --min-tokens left out")
    if broken := facts["documents_not_utf_8"]:
        said.append(f"{broken} with bytes that are not UTF-8, which became \ufffd")
    if left_out:
        shown = ", ".join(path.name for path in left_out[:3])
        said.append(f"{len(left_out)} files of other kinds not read ({shown}{' ...' if len(left_out) > 3 else ''})")
    print(f"{to}: {'; '.join(said)}.", file=sys.stderr)
