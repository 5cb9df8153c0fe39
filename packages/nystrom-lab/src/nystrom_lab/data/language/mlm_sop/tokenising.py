"""Tokenise corpora into blocks with several processes, continuing where an earlier attempt ended.

One process reads; the others turn blocks of a few megabytes into tokens. Corpora are processed in shards of at least 64
MB of files: a finished shard is not read again; of an unfinished one, the part that is already in a block is read but
not tokenised again.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

from nystrom.progress import Progress
from nystrom.whole_files import write_whole
from nystrom_lab.data.language.mlm_sop.blocks import BlockPlan, is_held_out, leave_threads, read_block, write_block
from nystrom_lab.data.sources.corpora import Corpus
from nystrom_lab.data.sources.documents import TextPiece

BLOCK, SHARD = 4 << 20, 64 << 20
# With more files than these the bar counts files, with fewer each has a bar of its own.
FEW = 8

Judged = tuple[TextPiece, bool]


def tokenise(
    corpora: Sequence[Corpus],
    kept: Path,
    plan: BlockPlan,
    *,
    workers: int,
    block_size: int = BLOCK,
    shard_size: int = SHARD,
    progress: bool = False,
) -> list[Path]:
    """Write the blocks of all corpora, and return their files in order.

    Args:
        corpora: Corpora to read.
        kept: Folder of finished work.
        plan: How documents become a block.
        workers: Processes, or 1 for none but this one.
        block_size: Bytes of text in a block, at least.
        shard_size: Bytes of files in a shard, at least.
        progress: Say how far it is.

    Raises:
        ValueError: A corpus is broken, or its first documents are all too short.
        OSError: A block cannot be written, or a process was killed by the system.
    """
    blocks: list[Path] = []
    files = progress and len(corpora) > FEW
    bar = Progress("texts", len(corpora), unit="files", shown=files)
    with bar, _Team(workers, plan) as team:
        for number, shard in enumerate(shards(corpora, shard_size)):
            finished = kept / f"{number:06}.finished"
            if finished.is_file():
                count = int(finished.read_text())
                bar.update(len(shard))
            else:
                count = 0
                for pieces in _in_blocks(shard, plan, block_size, bar, progress and not files):
                    path = kept / f"{number:06}-{count:06}.npz"
                    if not path.is_file():
                        team.write(path, pieces)
                    count += 1
                    if not blocks and count == 1:
                        team.wait()
                        _check_length(path, plan)
                team.wait()
                write_whole(finished, f"{count}\n")
            paths = [kept / f"{number:06}-{block:06}.npz" for block in range(count)]
            if any(not path.is_file() for path in paths):
                finished.unlink()
                raise OSError(f"{kept} lacks a block that was finished: run the same command again.")
            blocks += paths
    return blocks


def shards(corpora: Sequence[Corpus], size_wanted: int) -> Iterator[list[Corpus]]:
    """Group corpora until each group has the wanted number of bytes."""
    shard: list[Corpus] = []
    size = 0
    for corpus in corpora:
        shard.append(corpus)
        size += corpus.size
        if size >= size_wanted:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard


def _in_blocks(
    shard: Sequence[Corpus], plan: BlockPlan, block_size: int, bar: Progress, progress: bool
) -> Iterator[list[Judged]]:
    pieces: list[Judged] = []
    size, held_out = 0, False
    for corpus in shard:
        for piece in corpus.pieces(progress):
            if piece.begins:
                held_out = is_held_out(piece.text, plan)
            pieces.append((piece, held_out))
            size += len(piece.text)
            if size >= block_size:
                yield pieces
                pieces, size = [], 0
        bar.update()
    if pieces:
        yield pieces


def _check_length(first: Path, plan: BlockPlan) -> None:
    lengths, counts = read_block(first, "lengths", "counts")
    if not lengths.size:
        first.unlink()
        raise ValueError(
            f"none of the first {counts[0]} documents has {plan.min_tokens} tokens: a blank line ends a document, and"
            " a row is one; join them to longer ones, or lower --min-tokens."
        )


class _Team:
    """Processes that write blocks while the next ones are read.

    They end when the other end of a pipe closes: when the work fails or is interrupted, however often, and when this
    process is killed. A block appears under its name when it is complete, so they may end anywhere.
    """

    def __init__(self, workers: int, plan: BlockPlan):
        self._workers, self._plan = workers, plan
        self._ahead: deque[Future[int]] = deque()
        self._pool: ProcessPoolExecutor | None = None
        self._pipe = ExitStack()

    def __enter__(self) -> "_Team":
        if self._workers > 1:
            # Fresh processes: a fork would copy the locks of threads that other libraries run.
            context = multiprocessing.get_context("spawn")
            end, ours = context.Pipe(duplex=False)
            self._pipe.enter_context(ours)
            self._pool = ProcessPoolExecutor(
                self._workers, mp_context=context, initializer=_prepare_worker, initargs=(end,)
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is None:
            return
        if kind is not None:
            self._pipe.close()
        with self._pipe:
            self._pool.shutdown(cancel_futures=True)

    def write(self, path: Path, pieces: Sequence[Judged]) -> None:
        if self._pool is None:
            write_block(path, pieces, self._plan)
            return
        self._ahead.append(self._pool.submit(write_block, path, pieces, self._plan))
        self.wait(self._workers + 2)

    def wait(self, left: int = 0) -> None:
        """Wait until at most `left` blocks are unfinished."""
        try:
            while len(self._ahead) > left:
                self._ahead.popleft().result()
        except BrokenProcessPool as error:
            raise OSError(
                "a tokenising process was killed by the system, perhaps for lack of memory: use fewer"
                f" than {self._workers} with --workers; a script calls prepare_mlm_sop under"
                " `if __name__ == '__main__':`."
            ) from error


def _prepare_worker(end: Connection) -> None:
    # An interruption is for the process that waits for this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(end,), daemon=True).start()
    leave_threads()


def _end_with(end: Connection) -> None:
    # Nothing is ever sent: the pipe is ready when its other end is closed.
    end.poll(None)
    os._exit(1)
