"""Engines that run an encoder on a CPU, side by side: time, memory, and how far their hidden states are off.

Each engine runs in a process of its own (`nystrom_papers.bench.engine_process`), which sleeps while another runs, with
equally many threads. All read the same weights, made from one folder (`nystrom_papers.bench.engine_files`), and the
same tokens of one text. An engine loads, makes a first call, which compiles what it compiles and gives the hidden
states, and then takes turns with the others; one that took more than twice torch's time in the first turn takes no
more. An engine that is not installed, or fails, has a row of NaN whose note says why.

Quantities of an engine at a length: its time in s (median and quartiles of the turns); the quartiles of its time over
that of exact attention in torch, and over that of the fastest exact engine, within the turns that both took; the error
of the hidden states, $|H - H'|_F / |H|_F$ with H those of exact attention in torch, in float32; and memory in MB, as
`engine_process` measures it.

Pieces of 512 tokens are what an encoder reads that is not lengthened: positions begin anew in each, and no token
attends to another piece. The error is that of another computation, not of an approximation.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nystrom.checks import check_at_least, check_names
from nystrom.interleaved_timing import in_turns, quartiles, ratios
from nystrom.temporary import scratch_folder
from nystrom.whole_files import check_folder
from nystrom_lab.measure.rows import Row, append_rows, cores, read_rows
from nystrom_papers.bench.engine_kinds import ENGINES, EXACT, MODEL, TOKENS, Engine, EngineJob
from nystrom_papers.bench.engine_process import Called, EngineProcess, engine_process, line_of
from nystrom_papers.report.engines import BESIDE_BEST, BESIDE_TORCH, ERROR, MEMORY, STUDY, TIME, WHOLE_MEMORY

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float

# In units of torch's time, a time from which an engine takes no second turn.
_SLOW = 2.0
# Matrices of scores of all pairs of tokens that such an engine holds at a time, and its share of the free memory.
_SCORES, _SHARE = 4, 0.6


@dataclass(frozen=True)
class EnginesOptions:
    """Measure an encoder in each engine that runs it on a CPU, side by side, over the number of tokens.

    The text is the Python language reference. Engines other than torch come with nystrom-papers[engines]; one that is
    not installed, or cannot run the model, is reported and left out. Exact attention in torch is always measured.

    Attributes:
        folder: Folder of an encoder of transformers, such as a BERT; its positions are stretched to each length.
        to: File for the rows, written after each length; it may have those of other lengths.
        lengths: Numbers of tokens.
        threads: Threads of each engine.
        turns: Turns that are timed; an engine that takes more than twice torch's time takes one.
        engines: Engines to measure.
    """

    folder: Path
    to: Path
    _: KW_ONLY
    lengths: tuple[int, ...] = (2048, 4096, 8192)
    threads: int = 1
    turns: int = 5
    engines: tuple[str, ...] = tuple(ENGINES)

    def __post_init__(self):
        for name in ("lengths", "engines"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; expected at least one.")
        for n in self.lengths:
            check_at_least("an entry of lengths", n, 8)
        check_at_least("threads", self.threads, 1)
        if self.threads > cores():
            raise ValueError(
                f"threads is {self.threads}, but this process may use {cores()} cores: more threads would wait for "
                "each other, in each engine otherwise."
            )
        check_at_least("turns", self.turns, 1)
        check_names("engine", self.engines, ENGINES)


@dataclass
class Measured:
    """The outcome of one engine at one length; `fault` says why there is nothing more, "" if there is all."""

    engine: Engine
    fault: str = ""
    error: float = nan
    seconds: list[float] = field(default_factory=list)
    beyond: float = 0.0
    whole: float = 0.0


def run_engines(options: EnginesOptions) -> list[Row]:
    """Measure the rows of `EnginesOptions`.

    Raises:
        ValueError: A folder that holds no encoder of transformers, a file of other rows, or torch failed.
    """
    from nystrom.models import EncoderConfig
    from nystrom_lab.data.language.encoder_texts import load_encoder

    model: Any = load_encoder(options.folder)
    config = model.config
    if isinstance(config, EncoderConfig):
        raise ValueError(
            f"folder is {options.folder}, a model of type {config.model_type!r}, which no other engine reads: name the "
            "encoder of transformers that it was made from."
        )
    shape = {"layers": config.num_hidden_layers, "width": config.hidden_size, "heads": config.num_attention_heads}
    facts = {"model": options.folder.name, **shape, "threads": options.threads}
    blank = Row(study=STUDY, quantity="", method="", value=0.0, facts=facts)
    del model
    _check_file(options, blank)
    names = tuple(dict.fromkeys((EXACT, *options.engines)))
    rows: list[Row] = []
    for n in dict.fromkeys(options.lengths):
        with scratch_folder() as place:
            outcomes = _measure(n, names, EngineJob(place, options.folder, options.threads), options.turns, config)
        new = rows_of(outcomes, replace(blank, n=n))
        append_rows(options.to, new)
        rows += new
        print(f"{n} tokens: rows in {options.to}.", file=sys.stderr)
    return rows


def _check_file(options: EnginesOptions, blank: Row) -> None:
    """Check that the file of rows is new, or has those of other lengths of this model and these threads."""
    check_folder(options.to.parent)
    if not os.path.lexists(options.to):
        return
    for row in read_rows(options.to):
        for name, came, wanted in (
            ("study", row.study, STUDY),
            *((name, row.fact(name), blank.fact(name)) for name in ("model", "threads")),
        ):
            if came != wanted:
                raise ValueError(f"{options.to} holds rows of {name} {came!r}, not {wanted!r}: choose another file.")
        if row.n in options.lengths:
            raise ValueError(f"{options.to} has {row.n} tokens already: leave this length out, or choose another file.")


def _measure(n: int, names: tuple[str, ...], job: EngineJob, turns: int, config: Any) -> dict[str, Measured]:
    """Measure these engines at one length."""
    outcomes = {name: Measured(ENGINES[name], ENGINES[name].lacks()) for name in names}
    _make_files(n, outcomes, job)
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(engine_process(name, job)) for name, each in outcomes.items() if not each.fault
        }
        for process in running.values():
            process.wait()
        exact = None
        for name, process in running.items():
            too_much = _too_much(n, config.num_attention_heads) if outcomes[name].engine.all_pairs else ""
            process.fault = process.fault or too_much
            exact = _first_call(process, outcomes[name], exact)
        clocks = {
            name: partial(_turn, process, outcomes[name]) for name, process in running.items() if not process.fault
        }
        times = in_turns(clocks, 1, warm_up=False)
        quick = {name: clock for name, clock in clocks.items() if times[name][0] <= _SLOW * times[EXACT][0]}
        more = in_turns(quick, turns - 1, warm_up=False)
        if running[EXACT].fault:
            raise _no_exact(running[EXACT])
        for name in clocks:
            outcomes[name].seconds = [*times[name], *more.get(name, ())]
        for name, process in running.items():
            outcomes[name].fault = process.fault
    return outcomes


def _make_files(n: int, outcomes: Mapping[str, Measured], job: EngineJob) -> None:
    """Make the files of a length; an engine whose file cannot be made gets the reason."""
    import torch

    from nystrom_papers.bench.engine_files import FILES, make_file, stretch_model, write_tokens

    torch.set_num_threads(job.threads)
    stretch_model(job.source, n, job.place / MODEL)
    write_tokens(job.place / MODEL, n, job.place / TOKENS)
    faults: dict[str, str] = {}
    for file in FILES:
        if any(file in each.engine.files and not each.fault for each in outcomes.values()):
            print(f"{n} tokens: {file}", file=sys.stderr)
            try:
                make_file(file, job.place)
            except Exception as error:  # noqa: BLE001 (whatever another's converter raises, the others go on)
                faults[file] = line_of(error)
    for each in outcomes.values():
        each.fault = each.fault or next((faults[file] for file in each.engine.files if file in faults), "")


def _too_much(n: int, heads: int) -> str:
    """Why an engine that holds the scores of all pairs of tokens is not called; "" if it is."""
    import torch

    from nystrom_lab.measure.memory import free_bytes

    needs, there = _SCORES * 4 * heads * n**2, _SHARE * free_bytes(torch.device("cpu"))
    return f"needs about {needs / 1e9:.2g} GB, more than {_SHARE:.0%} of the free memory" if needs > there else ""


def _first_call(
    process: EngineProcess, into: Measured, exact: "Float[np.ndarray, 'n w'] | None"
) -> "Float[np.ndarray, 'n w']":
    """Make the first call; returns the exact hidden states, which are those of the first engine."""
    import numpy as np

    called = process.call()
    if called is None:
        if exact is None:
            raise _no_exact(process)
        return exact
    assert called.states is not None
    exact = called.states if exact is None else exact
    if called.states.shape != exact.shape:
        process.fault = f"its hidden states have the shape {called.states.shape}, those of torch {exact.shape}"
        return exact
    into.error = float(np.linalg.norm(called.states - exact) / np.linalg.norm(exact))
    if not isfinite(into.error):
        process.fault = "its hidden states are not finite"
    _note_memory(called, into)
    return exact


def _no_exact(process: EngineProcess) -> ValueError:
    return ValueError(f"exact attention in torch fails, with which all engines are compared: {process.fault}.")


def _turn(process: EngineProcess, into: Measured) -> float:
    """The seconds of one call; infinite if the engine fails."""
    called = process.call()
    if called is None:
        return float("inf")
    _note_memory(called, into)
    return called.seconds


def _note_memory(called: Called, into: Measured) -> None:
    into.beyond, into.whole = max(into.beyond, called.beyond), max(into.whole, called.whole)


def rows_of(outcomes: Mapping[str, Measured], blank: Row) -> list[Row]:
    """The rows of all engines at one length.

    Args:
        outcomes: The outcome of each; exact attention in torch first.
        blank: A row with the facts that all rows share.
    """
    well = {name: each.seconds for name, each in outcomes.items() if not each.fault}
    best = min((name for name in well if outcomes[name].engine.exact), key=lambda name: quartiles(well[name]).middle)
    rows: list[Row] = []
    for name, each in outcomes.items():
        version = each.engine.version if not each.engine.lacks() else ""
        like = replace(blank, method=name, dtype=each.engine.dtype, note=each.fault).with_facts(engine=version)
        if each.fault:
            rows.append(replace(like, quantity=TIME, unit="s", value=nan, repeats=0))
            continue
        for quantity, unit, spread in (
            (TIME, "s", quartiles(each.seconds)),
            (BESIDE_TORCH, "", _beside(each.seconds, well[EXACT])),
            (BESIDE_BEST, "", _beside(each.seconds, well[best])),
        ):
            low, middle, high = spread
            timed = replace(like, quantity=quantity, unit=unit, value=middle, low=low, high=high)
            rows.append(replace(timed, repeats=len(each.seconds)))
        rows += [
            replace(like, quantity=ERROR, value=each.error),
            replace(like, quantity=MEMORY, unit="MB", value=each.beyond, repeats=1 + len(each.seconds)),
            replace(like, quantity=WHOLE_MEMORY, unit="MB", value=each.whole, repeats=1 + len(each.seconds)),
        ]
    return rows


def _beside(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """The quartiles of the ratio within the turns that both took."""
    both = min(len(ours), len(theirs))
    return ratios(ours[:both], theirs[:both])
