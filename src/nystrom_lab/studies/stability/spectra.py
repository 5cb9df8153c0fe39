r"""Appendix B of Skyformer: singular values of the attention output of trained models.

The attention output of the second layer, with all heads side by side and before its projection, is a c x 64 matrix for
a sequence of c real tokens. Its 64 singular values, divided by the largest, are averaged over one batch of the test
split. The model is a trained one with softmax attention; it is compared with one of the same shape and random weights.

The relative error at rank r is $e_r = \sqrt{\sum_{i > r} \sigma_i^2 / \sum_i \sigma_i^2}$, that of the truncated SVD in
the Frobenius norm.

Claims and the rules that decide them, by what is known of a mean (`nystrom_lab.studies.reproduce.known`). A model has
learned if it is right on more samples of the batch than the one with random weights, by what is known of its share.
Unless the models of all tasks have learned, nothing is decided.

- "The singular values decay fast and thus justify the low-rank approximation": in every task the mean error at rank 16,
  a quarter of 64, is at most 0.1.
- "The singular values in Document Retrieval and Pathfinder tasks decay slower" than in Text and ListOps: the mean error
  at rank 16 is larger in both of the former than in both of the latter.

With --runs the models are those of trained runs of `nystrom lra run`, one for each task. Without it, a model is trained
on short ListOps for some hundred steps, with the initial weights of the preset "demo", from which it learns in that
time.

Source: Chen et al. (2021), arXiv:2111.00035, Appendix B and its Fig. 2, which prints no numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nystrom.models.encoder import EncoderLayer
from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.data.store.header import HEADER
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.canvas import COLOURS, PAGE, REFERENCE, figure_of, plain_numbers
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.reproduce.known import mean_of, most, share_of
from nystrom_lab.studies.reproduce.spread import spread_row
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study
from nystrom_lab.studies.stability.arena import ArenaTask, Batch, new_model, preset_of, random_batches
from nystrom_lab.studies.stability.loop import evaluate, train_plainly
from nystrom_lab.training.data.tasks import Model, class_names, find_task
from nystrom_lab.training.presets.published import DEPARTURES
from nystrom_lab.training.presets.sizes import DataSizes
from nystrom_lab.training.run.folder import RunFolder
from nystrom_lab.training.run.progress import no_file_bars
from nystrom_lab.training.scoring import load_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_VALUE, _ERROR, _ACCURACY = "singular value over the largest", "relative error at rank r", "test accuracy"
_RANKS = (4, 8, 16, 32)
# Samples have at least as many tokens as there are singular values.
_SHORT = DataSizes(folder="listops", train=16_000, val=1, test=64, min_length=64, max_length=128)
_STEPS, _BATCH, _RATE = 600, 32, 2e-3
_FAST, _SLOW = ("text", "listops"), ("retrieval", "pathfinder")
_PAPER_TASKS = (*_FAST, *_SLOW)
_QUARTER, _SMALL_ERROR = 16, 0.1


def _plan(setting: Setting) -> Plan:
    if setting.runs is None:
        if setting.size == "paper":
            raise ValueError(
                "--size paper needs trained models: name the folder of `nystrom lra run --preset skyformer` with "
                "--runs."
            )
        source = ArenaTask("listops", None, _SHORT)
        parts = [Part("listops", partial(_measure_new, source))]
        said = {
            "tasks": source.name,
            "training": f"{_STEPS} steps of {_BATCH}, learning rate {_RATE:g}, preset demo, seed 0",
        }
        return Plan(parts, said, f"ListOps to {_SHORT.max_length} tokens alone, {_STEPS} steps instead of 50,000")
    runs = _find_runs(setting)
    missing = [task for task in _PAPER_TASKS if task not in runs]
    if setting.size == "paper" and missing:
        raise ValueError(
            f"--size paper needs runs of {', '.join(missing)} with softmax and the preset skyformer in --runs "
            f"{setting.runs}, finished."
        )
    parts = [Part(task, partial(_measure_run, task, *found)) for task, found in runs.items()]
    said = {"tasks": " ".join(runs), "runs": " ".join(model.parent.name for model, _ in runs.values())}
    return Plan(parts, said, "; ".join([*([f"without {', '.join(missing)}"] if missing else []), DEPARTURES]))


def _find_runs(setting: Setting) -> dict[str, tuple[Path, Path]]:
    """A run of each task with softmax attention, and its data; the paper's preset and the lowest seed come first."""
    assert setting.runs is not None
    found: dict[str, list[tuple[bool, int, Path, Path]]] = {}
    for path in sorted(setting.runs.glob("*/run.json")):
        run = RunFolder(path.parent)
        settings: dict[str, Any] = run.read()["settings"]
        paper = settings["preset"] == "skyformer"
        if settings["attention"] != "softmax" or not run.is_finished or (setting.size == "paper" and not paper):
            continue
        task = settings["task"]
        data = run.data_folder() if setting.data is None else setting.data / task
        if data is None or not (data / HEADER).is_file():
            raise ValueError(f"{run.path} was trained on {data}, which is missing: name its parent with --data.")
        found.setdefault(task, []).append((not paper, settings["seed"], run.best, data))
    if not found:
        raise ValueError(
            f"--runs {setting.runs} holds no finished run with softmax attention; expected the folder of "
            "`nystrom lra run --methods softmax`."
        )
    best = {task: min(found[task]) for task in LRA if task in found}
    return {task: (model, data) for task, (_, _, model, data) in best.items()}


def _measure_run(task: str, model: Path, data: Path, folder: Path) -> Iterable[Row]:
    source = ArenaTask(task, data, preset_of(task).data)
    test = source.open("test", folder)
    with no_file_bars():
        trained = load_model(model, task, classes=class_names(test))
    untrained = find_task(task).model(trained.config)
    count = min(len(test), preset_of(task).batch_size)
    batch = next(random_batches(source, test, batch=count, count=1, seed=0))
    return _rows(task, {"trained": trained, "initialised": untrained}, batch)


def _measure_new(source: ArenaTask, folder: Path) -> Iterable[Row]:
    trained, untrained = (new_model(source, "softmax", seed=0, preset="demo") for _ in range(2))
    train_plainly(
        trained, source, source.open("train", folder), [],
        learning_rate=_RATE, steps=_STEPS, batch=_BATCH, every=_STEPS, seed=0,
    )  # fmt: skip
    batch = next(random_batches(source, source.open("test", folder), batch=_BATCH, count=1, seed=0))
    return _rows(source.task, {"trained": trained, "initialised": untrained}, batch)


def _rows(task: str, models: Mapping[str, Model], batch: Batch) -> Iterable[Row]:
    n = batch["input_ids"].shape[-1]
    for weights, model in models.items():
        facts = {"task": task, "weights": weights, "b": len(batch["labels"])}
        values = output_singular_values(model, batch)
        relative, square = values / values[:, :1], values.square()
        for place in range(values.shape[1]):
            yield spread_row(_VALUE, "softmax", relative[:, place], n=n, m=place + 1, facts=facts, dtype="float64")
        for rank in _RANKS:
            error = (square[:, rank:].sum(dim=1) / square.sum(dim=1)).sqrt()
            yield spread_row(_ERROR, "softmax", error, n=n, m=rank, facts=facts, dtype="float64")
        yield spread_row(_ACCURACY, "softmax", torch.tensor([evaluate(model, [batch])[1]]), n=n, facts=facts)


def output_singular_values(model: Model, batch: Batch) -> Float[Tensor, "b w"]:
    """Falling singular values of the second layer's attention output over the real tokens of each sequence."""
    kept: list[Tensor] = []
    layer = model.nystromformer.encoder.layer[1]
    assert isinstance(layer, EncoderLayer)
    attention = layer.attention.self

    def keep_output(module: nn.Module, inputs: object, output: Any) -> None:
        kept.append(output)

    handle = attention.register_forward_hook(keep_output)
    try:
        with torch.no_grad():
            model.eval()(**batch)
    finally:
        handle.remove()
    x, keep = kept[0].double(), batch.get("attention_mask")
    if keep is not None:
        # Rows of zeros change no singular value.
        x = x * keep.flatten(0, -2)[..., None]
    return torch.linalg.svdvals(x)


def _panels(rows: Sequence[Row], quantity: str) -> dict[str, dict[str, dict[int, Row]]]:
    """Rows by task, weights, and number of the singular value or rank."""
    found: dict[str, dict[str, dict[int, Row]]] = {}
    for row in rows:
        if row.quantity == quantity:
            task, weights = row.facts["task"], row.facts["weights"]
            found.setdefault(task, {}).setdefault(weights, {})[row.m or 0] = row
    return found


def _tables(rows: Sequence[Row]) -> Sequence[Table]:
    accuracies = _panels(rows, _ACCURACY)
    lines = [
        [task, weights, *(f"{places[rank].value:.1e}" for rank in _RANKS), f"{accuracies[task][weights][0].value:.0%}"]
        for task, panel in _panels(rows, _ERROR).items()
        for weights, places in panel.items()
    ]
    heads = ["task", "weights", *(f"r={rank}" for rank in _RANKS), "right"]
    return [Table("relative error of the truncated SVD of the attention output at rank r", heads, lines, left=2)]


def _verdicts(rows: Sequence[Row]) -> Sequence[Verdict]:
    errors = {task: panel["trained"][_QUARTER] for task, panel in _panels(rows, _ERROR).items()}
    known, idle = {task: mean_of(row) for task, row in errors.items()}, _not_learned(rows)
    missing = [task for task in _PAPER_TASKS if task not in known]
    pairs = [] if missing else [known[slow].over(known[fast]) for slow, fast in product(_SLOW, _FAST)]
    numbers = f"the mean error at rank 16 is {', '.join(f'{row.value:.2g} ({task})' for task, row in errors.items())}."
    numbers += f" No better than random weights: {', '.join(idle)}." if idle else ""
    fast, slower = (
        most(answers)
        for answers in ((each.within(most=_SMALL_ERROR) for each in known.values()), (ratio.above() for ratio in pairs))
    )
    return [
        Verdict(
            "The singular values of the attention output decay fast, which justifies low rank.",
            None if idle else fast,
            numbers,
        ),
        Verdict(
            "They decay slower on Retrieval and Pathfinder than on Text and ListOps.",
            None if idle else slower,
            f"not there: {', '.join(missing)}." if missing else numbers,
        ),
    ]


def _not_learned(rows: Sequence[Row]) -> list[str]:
    """Tasks whose trained model is not known to be right on more samples than the one with random weights."""
    return [
        task
        for task, panel in _panels(rows, _ACCURACY).items()
        for trained, untrained in ((panel["trained"][0], panel["initialised"][0]),)
        if share_of(trained.value, int(trained.fact("b"))).low <= untrained.value
    ]


def _figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    panels = _panels(rows, _VALUE)
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = figure_of(PAGE if columns > 1 else PAGE / 2, 0.5 + 2.3 * lines)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).ravel()
    looks = {"trained": (COLOURS[0], "-"), "initialised": (REFERENCE, "--")}
    for axes, (task, panel) in zip(grid, panels.items(), strict=False):
        for weights, places in panel.items():
            colour, style = looks[weights]
            those = list(places.values())
            axes.plot(list(places), [row.value for row in those], color=colour, linestyle=style, label=weights)
            low, high = ([getattr(row, end) for row in those] for end in ("low", "high"))
            axes.fill_between(list(places), low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set_yscale("log")
        plain_numbers(axes, "y")
        axes.set_xticks((1, 16, 32, 48, 64))
        axes.set_title(f"{task}; bands: quartiles of the batch")
        axes.set_xlabel("singular value i")
        axes.grid(True)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    grid[0].set_ylabel("over the largest")
    grid[0].legend()
    return {"": figure}


STUDIES = {"skyformer-appendix-b": Study(plan=_plan, tables=_tables, verdicts=_verdicts, figures=_figures)}
