"""Time training steps that differ in one choice, in turn.

    python tools/compare_steps.py heads --to runs/compare-heads.csv
    python tools/compare_steps.py formats --to runs/compare-formats.csv
    python tools/compare_steps.py dropout --to runs/compare-dropout.csv

`heads`: a training step on masked words that scores all tokens, compared with one that scores only the masked tokens
(`EncoderConfig.sparse_prediction`), of the model for masked words and of the one for pretraining. A step is forward,
backward and AdamW; both have the same initial weights and the same batch.

`formats`: loading a batch of ListOps from a prepared folder of this library, compared with an Arrow folder that
`datasets.Dataset.save_to_disk` wrote of the same samples and that is read in its numpy format; and a training step
with each, the loading included. Sampler, collator and batches are the same. It needs `pip install datasets`.

`dropout`: a training step of a classifier with the dropout of `nystrom.models.parts.dropout`, compared with the same
classifier with torch's.

Times are CPU seconds of the process with one thread, which a busy machine disturbs less than the clock. In each round
every choice is timed once, in an order that changes from round to round. A row is a median over rounds with its
quartiles; a ratio is taken in each round.
"""

import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor
from torch.utils.data import DataLoader

from nystrom.checks import check_at_least
from nystrom.models import EncoderConfig, EncoderForMaskedLM, EncoderForPreTraining, EncoderForSequenceClassification
from nystrom.models.parts.dropout import Dropout
from nystrom_lab.data.lra.listops.task import ListOps, prepare_listops
from nystrom_lab.measure.rows import Row, append_rows, cpu_name, new_row
from nystrom_lab.studies.speed.asked import command_line
from nystrom_lab.training.data.batches import TrainingOrder, collate

COMMAND = ("python", "tools/compare_steps.py")
LANDMARKS = 64
MASKED = 0.15

Call = Callable[[], object]


def compare_heads(
    *,
    to: Path,
    layers: int = 4,
    width: int = 256,
    batch: int = 8,
    tokens: int = 256,
    vocabulary: int = 30522,
    rounds: int = 7,
) -> list[Row]:
    """Compare scoring all tokens with scoring only the masked tokens.

    Args:
        to: New file of the rows.
        layers: Layers of the encoder.
        width: Its width, in heads of 64.
        batch: Sequences of a batch.
        tokens: Tokens of a sequence, 15 % of them masked.
        vocabulary: Words.
        rounds: Rounds.

    Raises:
        ValueError: A size is below 1, or the file exists.
    """
    asked = dict(locals())
    _check(to, asked)
    config: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, width // 64),
        "intermediate_size": 4 * width,
        "max_position_embeddings": tokens,
        "attention_options": {"num_landmarks": LANDMARKS},
    }
    torch.manual_seed(0)
    ids = torch.randint(5, vocabulary, (batch, tokens))
    labels = ids.masked_fill(torch.rand(batch, tokens) >= MASKED, -100)
    inputs = {"input_ids": ids, "labels": labels}
    rows = []
    with _one_thread():
        for name, kind in (("masked LM", EncoderForMaskedLM), ("pretraining", EncoderForPreTraining)):
            calls: dict[str, Call] = {}
            for choice, sparse in (("all tokens scored", False), ("masked tokens scored", True)):
                torch.manual_seed(0)
                calls[choice] = _step(kind(EncoderConfig(**config, sparse_prediction=sparse)), lambda: inputs)
            rows += _rows(
                f"{name} training step time",
                in_turn(calls, rounds=rounds),
                n=tokens,
                facts={
                    "b": batch,
                    "layers": layers,
                    "width": width,
                    "vocabulary": vocabulary,
                    "masked": MASKED,
                    "threads": 1,
                },
                command=command_line((*COMMAND, "heads"), compare_heads, asked | {"rounds": (rounds,)}, "rounds"),
            )
    return _written(to, rows)


def compare_formats(
    *,
    to: Path,
    samples: int = 4000,
    batch: int = 32,
    min_length: int = 500,
    max_length: int = 2000,
    loads: int = 20,
    rounds: int = 15,
) -> list[Row]:
    """Compare the prepared folders of this library with Arrow.

    Args:
        to: New file of the rows.
        samples: Expressions of ListOps to draw.
        batch: Samples of a batch.
        min_length: Expressions are longer than this many tokens.
        max_length: Expressions are shorter than this many tokens.
        loads: Batches to load in a round, of which the mean is taken.
        rounds: Rounds.

    Raises:
        ValueError: A size is below 1, the file exists, or the package datasets is not installed.
    """
    asked = dict(locals())
    _check(to, asked)
    library = _datasets()
    with tempfile.TemporaryDirectory() as place, _one_thread():
        folder = prepare_listops(
            Path(place) / "prepared",
            train=samples,
            val=1,
            test=1,
            min_length=min_length,
            max_length=max_length,
            progress=False,
        )
        ours = ListOps(folder, "train")
        splits = {"Arrow": _arrow(library, ours, Path(place) / "arrow"), "prepared folder": ours}

        def loader(split: Any, steps: int) -> Iterator[dict[str, Tensor]]:
            order = TrainingOrder(ours.lengths, batch_size=batch, steps=steps, seed=0)
            return iter(DataLoader(split, batch_size=batch, sampler=order, collate_fn=collate))

        for one, other in zip(*(loader(split, 2) for split in splits.values()), strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
        shared: dict[str, Any] = {
            "n": max_length,
            "facts": {
                "b": batch,
                "layers": 2,
                "width": 64,
                "samples": samples,
                "threads": 1,
                "datasets": version("datasets"),
                "pyarrow": version("pyarrow"),
            },
            "command": command_line((*COMMAND, "formats"), compare_formats, asked | {"rounds": (rounds,)}, "rounds"),
        }
        calls: dict[str, Call] = {}
        for name, split in splits.items():
            batches = loader(split, loads * (rounds + 1))
            calls[name] = lambda batches=batches: [next(batches) for _ in range(loads)]
        loading = in_turn(calls, rounds=rounds)
        loading = {name: [seconds / loads for seconds in found] for name, found in loading.items()}
        rows = _rows("loading time of a batch", loading, **shared)
        for name, split in splits.items():
            torch.manual_seed(0)
            batches = loader(split, rounds + 1)
            calls[name] = _step(EncoderForSequenceClassification(_classifier(max_length)), batches.__next__)
        rows += _rows("training step time, loading included", in_turn(calls, rounds=rounds), **shared)
    return _written(to, rows)


def compare_dropout(*, to: Path, tokens: int = 1024, batch: int = 32, rounds: int = 15) -> list[Row]:
    """Compare this library's dropout with torch's own.

    Args:
        to: New file of the rows.
        tokens: Tokens of a sequence.
        batch: Sequences of a batch.
        rounds: Rounds.

    Raises:
        ValueError: A size is below 1, or the file exists.
    """
    asked = dict(locals())
    _check(to, asked)
    torch.manual_seed(0)
    ids = torch.randint(1, ListOps.vocab_size, (batch, tokens))
    inputs = {"input_ids": ids, "labels": torch.randint(ListOps.num_labels, (batch,))}
    with _one_thread():
        calls: dict[str, Call] = {}
        for name in ("nystrom.models.parts.dropout", "torch.nn.Dropout"):
            torch.manual_seed(0)
            model = EncoderForSequenceClassification(_classifier(tokens))
            if name == "torch.nn.Dropout":
                _with_torch_dropout(model)
            calls[name] = _step(model, lambda: inputs)
        found = in_turn(calls, rounds=rounds)
        command = command_line((*COMMAND, "dropout"), compare_dropout, asked | {"rounds": (rounds,)}, "rounds")
        rows = _rows(
            "training step time",
            found,
            n=tokens,
            facts={"b": batch, "layers": 2, "width": 64, "threads": 1},
            command=command,
        )
    return _written(to, rows)


def _with_torch_dropout(model: torch.nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Dropout):
                setattr(module, name, torch.nn.Dropout(child.p))


def in_turn(
    calls: Mapping[str, Call], *, rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """Seconds of each call in each round, after a round that is not timed; every second round goes backwards."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name in list(calls)[:: 1 if i % 2 else -1]:
            start = clock()
            calls[name]()
            if i:
                found[name].append(clock() - start)
    return found


def _step(model: torch.nn.Module, load: Callable[[], Mapping[str, Tensor]]) -> Call:
    """A training step."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        batch = load()
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    return step


def _classifier(positions: int) -> EncoderConfig:
    sizes: dict[str, Any] = {
        "vocab_size": ListOps.vocab_size,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": positions,
        "attention_options": {"num_landmarks": LANDMARKS},
        "num_labels": ListOps.num_labels,
        "norm": "pre",
    }
    return EncoderConfig(**sizes)


def _datasets() -> Any:
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError:
        raise ValueError("formats compares with datasets, which is not installed: pip install datasets.") from None


def _arrow(library: Any, split: ListOps, folder: Path) -> Any:
    """The same samples in Arrow, mapped into memory."""
    library.disable_progress_bars()
    arrow = importlib.import_module("pyarrow")
    tokens = arrow.array([sample["input_ids"] for sample in split], type=arrow.list_(arrow.uint8()))
    table = arrow.table({"input_ids": tokens, "labels": arrow.array(split.labels, type=arrow.int64())})
    # With a fingerprint, datasets need not pickle the table to make one, which some versions of dill cannot.
    library.Dataset(table, fingerprint="compared").save_to_disk(str(folder))
    return library.load_from_disk(str(folder)).with_format("numpy")


def _rows(quantity: str, seconds: Mapping[str, Sequence[float]], **shared: Any) -> list[Row]:
    """Rows of each choice, and of the first divided by the second."""
    first, second = seconds
    measured = {f"{quantity}, {name}": ("ms", [1e3 * value for value in found]) for name, found in seconds.items()}
    ratios = [one / other for one, other in zip(seconds[first], seconds[second], strict=True)]
    measured[f"{quantity}, {first} / {second}"] = ("", ratios)
    rows = []
    for name, (unit, values) in measured.items():
        quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        rows.append(
            new_row(
                study="compare",
                quantity=name,
                method=f"nystrom-{LANDMARKS}",
                m=LANDMARKS,
                value=statistics.median(values),
                low=quartiles[0],
                high=quartiles[2],
                unit=unit,
                repeats=len(values),
                device=cpu_name(),
                seed=0,
                **shared,
            )
        )
    return rows


def _check(to: Path, asked: Mapping[str, Any]) -> None:
    for name, value in asked.items():
        if name != "to":
            check_at_least(name, value, 1)
    if to.exists():
        raise ValueError(f"{to} exists: name another file in --to.")


def _written(to: Path, rows: list[Row]) -> list[Row]:
    append_rows(to, rows)
    for row in rows:
        print(f"{row.quantity}: {row.value:.4g} ({row.low:.4g} to {row.high:.4g}) {row.unit}".rstrip())
    return rows


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main(words: Sequence[str] | None = None) -> int:
    """Run a command; a mistake ends in one line and code 2."""
    try:
        commands = {
            "heads": compare_heads,
            "formats": compare_formats,
            "dropout": compare_dropout,
        }
        tyro.extras.subcommand_cli_from_dict(commands, args=words)
    except ValueError as error:
        print(f"compare_steps: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
