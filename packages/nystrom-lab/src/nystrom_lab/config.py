"""The options of the training commands: a frozen dataclass for each, and base classes for the fields that they share.

A field is described once, and its description is its help. Command lines, arguments of Python functions, arguments of
the processes of a grid, run.json, the rows of results and the commands recorded in them are made from these classes.

A preset is the default: it has the same base classes as the options of its command, and
`nystrom_lab.training.run_settings.train_options` takes from it what the user does not change. A field that is None
follows from the model, the texts or the other fields, and has its value in the settings of a run, a subclass of the
options and of `Resolved`. A field that is not compared says where or how something is run, and not what comes out:
run.json does not have it.
"""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

from nystrom.checks import (
    Design,
    FeedForward,
    PooledNormKind,
    Pooling,
    PositionKind,
    check_at_least,
    check_choice,
    check_positive,
    check_seed,
)
from nystrom.command_options import ConvertOptions, parameters_of

# Options whose names on the command line, in rows and in messages are not those of their fields.
FLAGS = MappingProxyType({"position_kind": "positions", "stretch": "positions"})

LearningRateSchedule = Literal["linear", "cosine", "constant", "rsqrt"]
Precision = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Where = Literal["local", "slurm"]
Learn = Literal["queries-keys", "attention", "all", "adapters"]
# Held-out instances of a pretraining that are scored.
INSTANCES = 2048
# Seconds that a process waits for the others, as torch has it.
TIMEOUT = 1800
# The least values of whole numbers; a kind of options may lack some, or resolve them later.
_LEAST = {
    **dict.fromkeys(["timeout", "threads", "accumulation", "context_parallel"], 1),
    **dict.fromkeys(["steps", "batch_size", "evaluate_every", "log_every"], 1),
    "warmup_steps": 0,
}


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How long a model is trained, in which batches and at which rate.

    Attributes:
        steps: Training steps. The warm-up of a shorter run shrinks in proportion.
        batch_size: Global batch size: samples per step, over all processes and accumulation steps.
        learning_rate: Peak learning rate, at the end of the warm-up.
        warmup_steps: Steps of linear warm-up.
        evaluate_every: Steps between evaluations, each followed by a checkpoint.
    """

    steps: int
    batch_size: int
    learning_rate: float
    warmup_steps: int
    evaluate_every: int


@dataclass(frozen=True, kw_only=True)
class Loop(Steps):
    """Further options that a preset sets.

    Attributes:
        dropout: Dropout on the hidden states.
        log_every: Steps between points of the training curve; divides evaluate_every.
    """

    dropout: float
    log_every: int


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Parts of a model of the Long Range Arena.

    Attributes:
        position_kind: "learned", a table; "rotary", queries and keys rotated by their position; or "none".
        rotary_share: With rotary positions, the share of the width that is rotated.
        rotary_across_heads: Spread the angles of rotary positions over the heads, from local to global ones.
        short_conv_kernel_size: Kernel size of the short convolutions of queries, keys and values before the method; 0
            for none.
        pooling: How tokens are pooled for the classification head: "mean", "first", "max", or "cls", a learned token
            before the first.
        pooled_norm: "batch" normalises each channel of the pooled vector to mean 0 and variance 1 over the samples that
            a process computes at once; or "none".
        feed_forward: "plain", "gated" by the activation (GEGLU, SwiGLU), or "glu", gated by the sigmoid.
        design: Classification head, dropout and initial values as in "transformers", in the papers' code ("authors") or
            in the "official" code of the Long Range Arena.
        drop_weights: Apply dropout to the weights of exact and kernelized attention, which are then stored; only in the
            design "authors". Other methods have no weights to drop.
    """

    position_kind: PositionKind
    rotary_share: float
    rotary_across_heads: bool
    short_conv_kernel_size: int
    pooling: Pooling
    pooled_norm: PooledNormKind
    feed_forward: FeedForward
    design: Design
    drop_weights: bool


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW and its learning rate.

    Attributes:
        schedule: The learning rate after the warm-up: "linear" or "cosine" to 0, "constant", or "rsqrt", the inverse
            square root of the step.
        clip_norm: Gradients are clipped to this norm; 0 for no clipping.
        adam_betas: Betas of AdamW, the decay of its running means.
        weight_decay: Weight decay of AdamW, on all weights except biases and norms.
    """

    schedule: LearningRateSchedule
    clip_norm: float
    adam_betas: tuple[float, float]
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class Regularity:
    """Options that keep a model from learning its samples by heart.

    Attributes:
        label_smoothing: Label smoothing in training: the share spread evenly over the classes.
        augment: Augment training samples anew in each pass: ListOps arguments reordered, texts cropped, images
            mirrored, shifted and scaled (Pathfinder: mirrored).
        denoise: Weight of a denoising loss, predicting every token of an input that is 30 % corrupted; 0 for clean
            inputs.
    """

    label_smoothing: float
    augment: bool
    denoise: float


@dataclass(frozen=True, kw_only=True)
class Arena(Loop, Regularity, Optimizer, Parts):
    """Options that a preset of the Long Range Arena sets, and a user may change."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that computes a model.

    Attributes:
        precision: "auto" is bfloat16 autocast on an accelerator that has it, and float32 elsewhere.
        device: "auto" uses an accelerator if there is one.
    """

    precision: Precision = "auto"
    device: Device = "auto"


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Columns, or fields, of a user's own files.

    Attributes:
        text_field: Column of the texts, or of the first text of each pair, in your own files. Default: the usual names.
        label_field: Column of the labels in your own files.
        pair_field: Column of the second text of each pair, for retrieval.
    """

    text_field: str | None = field(default=None, compare=False)
    label_field: str | None = field(default=None, compare=False)
    pair_field: str | None = field(default=None, compare=False)

    def columns(self) -> dict[str, Any]:
        """The columns by name; None for the usual names."""
        return {entry.name: getattr(self, entry.name) for entry in fields(Columns)}

    def check_no_columns(self, why: str) -> None:
        """Check that no column was given.

        Raises:
            ValueError: One was.
        """
        for name, value in self.columns().items():
            if value is not None:
                raise ValueError(f"--{name.replace('_', '-')} is {value!r}, but {why}: leave it out.")


@dataclass(frozen=True, kw_only=True)
class RunOptions(Machine):
    """Options of how a training is run.

    Attributes:
        seed: Seed of initial weights, the order of samples, random draws and dropout.
        resume: Continue the run in the folder, from its last complete checkpoint.
        accumulation: Gradient-accumulation steps, which save memory; evaluations are split likewise.
        context_parallel: Processes that split the tokens of each sample, for samples that do not fit in one process.
        threads: CPU threads. Default: torch's choice.
        timeout: Seconds to wait for the other processes; then the run ends, and can be resumed.
    """

    seed: int = 0
    resume: bool = field(default=False, compare=False)
    accumulation: int = 1
    context_parallel: int = 1
    threads: int | None = field(default=None, compare=False)
    timeout: int = field(default=TIMEOUT, compare=False)

    def __post_init__(self):
        for name, least in _LEAST.items():
            if (value := getattr(self, name, None)) is not None:
                check_at_least(name, value, least)
        check_seed("seed", self.seed)
        if (rate := getattr(self, "learning_rate", None)) is not None:
            check_positive("learning_rate", rate)


@dataclass(frozen=True)
class TrainOptions(Arena, Columns, RunOptions):
    """Train a model on a task, choose its best checkpoint on the validation split, and evaluate it on the test split.

    Attributes:
        task: Task, such as "listops".
        attention: Attention method, see `nystrom methods`; "none" passes values through, as a baseline without
            attention. Default: that of the model, or nystrom.
        options: Options of the method.
        preset: "nystromformer" or "skyformer", as published, and "nystromformer-1000" or "skyformer-1000" for Text cut
            at 1,000 bytes; "official", as in the benchmark's own code; "modern", with later improvements, or
            "modern-small", for one core; or "demo", a few minutes on two cores. Default: that of the model's run, or
            nystromformer.
        model: Encoder to start from, such as RUN/best of `nystrom pretrain TASK`, with its settings and weights; the
            head is new.
        mask_share: Share of the tokens to mask and predict instead of the class; 0 to learn the class.
        data: Prepared data. Default: data/TASK, or data/TASK-demo for the demo, which is generated if missing, where
            possible. A resumed run uses its own. For text also your own labelled texts (.csv, .tsv, .jsonl, or a folder
            of them), for retrieval your own pairs of texts; they are prepared under data/. For pathfinder, images of
            any size: the model has one position per pixel.
        max_length: Longest sequence in tokens, and number of positions of the model, in place of the preset's; the
            default data are then data/TASK-LENGTH. Not for images, whose data have a fixed size.
        to: Folder of the run. Default: runs/TASK-ATTENTION-PRESET-seedSEED.
        conv_kernel_size: Kernel size of the skip convolution of the values, added to the attention; 0 for none.
        compile: Compile the model, and pad every batch to the model's positions, so that all steps use one graph.
    """

    task: str
    _: KW_ONLY
    attention: str
    options: Mapping[str, object] = field(default_factory=dict)
    preset: str
    model: Path | None = None
    mask_share: float = 0.0
    data: Path | None = field(default=None, compare=False)
    max_length: int | None = None
    to: Path | None = field(default=None, compare=False)
    conv_kernel_size: int | None = None
    compile: bool = False


@dataclass(frozen=True, kw_only=True)
class EncoderSize:
    """Sizes of a pretrained encoder.

    Attributes:
        length: Tokens of an instance.
        num_hidden_layers: Layers.
        hidden_size: Width of a token.
        num_attention_heads: Heads.
        intermediate_size: Width inside the feed-forward block.
    """

    length: int
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(RunOptions):
    """Pretrain an encoder on masked words and sentence order; keeps the checkpoint that is best on held-out documents.

    Attributes:
        data: Folder made by `nystrom data prepare mlm-sop`; usable for instances of any length.
        preset: "bert-small" or "bert-base", as published; "longer", which gives a trained model more positions; or
            "demo", for two cores.
        attention: Attention method, see `nystrom methods`. Default: that of the model, or nystrom.
        options: Options of the method.
        model: Folder of a trained model to start from: a BERT or RoBERTa, a Nyströmformer, or RUN/best.
        to: Folder of the run. Default: runs/pretrain-PRESET-ATTENTION-seedSEED.
        conv_kernel_size: Kernel size of the skip convolution of the values, added to the attention; 0 for none.
        instances: Maximum number of held-out instances per evaluation; the same in all runs on the data.
        workers: Processes that load batches ahead; affects only speed.
        compile: Compile the encoder, and pad every batch to `length`, so that all steps use one graph.
        steps: Training steps. Default: the preset's, as all that follow. The warm-up of a shorter run shrinks in
            proportion.
        batch_size: Global batch size: samples per step, over all processes and accumulation steps.
        learning_rate: Peak learning rate, at the end of the warm-up.
        warmup_steps: Steps of linear warm-up.
        evaluate_every: Steps between evaluations, each followed by a checkpoint.
        dropout: Dropout on the hidden states.
        log_every: Steps between points of the training curve; divides evaluate_every.
        length: Tokens of an instance.
        num_hidden_layers: Layers. Default: the preset's or the model's, as the sizes that follow.
        hidden_size: Width of a token.
        num_attention_heads: Heads.
        intermediate_size: Width inside the feed-forward block.
    """

    data: Path = field(compare=False)
    preset: str = "bert-small"
    attention: str | None = None
    options: Mapping[str, object] | None = None
    model: Path | None = None
    to: Path | None = field(default=None, compare=False)
    conv_kernel_size: int | None = None
    instances: int = INSTANCES
    workers: int = field(default=0, compare=False)
    compile: bool = False
    steps: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    warmup_steps: int | None = None
    evaluate_every: int | None = None
    dropout: float | None = None
    log_every: int | None = None
    length: int | None = None
    num_hidden_layers: int | None = None
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    intermediate_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """The resources that each job requests from SLURM.

    Attributes:
        partition: Partition. Default: the cluster's choice.
        time: Time limit of a job in minutes; then it is requeued and continues from its last checkpoint.
        timeouts: How often a job may reach the time limit.
        gpus: GPUs of a job, 0 or 1.
        memory: Memory of a job in gigabytes. Default: the cluster's choice.
        account: Account.
        qos: Quality of service.
        constraint: Features that the node must have.
    """

    partition: str | None = None
    time: int = 60
    timeouts: int = 10
    gpus: int = 0
    memory: int | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None

    def check(self, on: str) -> None:
        """Check the values, and that none are given if SLURM is not used.

        Raises:
            ValueError: An invalid value.
        """
        check_choice("on", on, ("local", "slurm"))
        for name, value in vars(self).items():
            if on == "local" and value != getattr(NO_SLURM, name):
                raise ValueError(f"slurm.{name} is {value!r} but on is 'local': add --on slurm, or leave it out.")
        check_at_least("slurm.time", self.time, 1)
        check_at_least("slurm.timeouts", self.timeouts, 0)
        if self.gpus not in (0, 1):
            raise ValueError(f"slurm.gpus is {self.gpus}; expected 0 or 1: a job trains on one device.")
        if self.memory is not None:
            check_at_least("slurm.memory", self.memory, 1)

    def device(self, device: str, precision: str) -> Device:
        """The device of a run in a job, "cuda" or "cpu".

        Args:
            device: The requested device; "auto" is what the job has.
            precision: The requested precision; the capabilities of a remote GPU cannot be checked here.

        Raises:
            ValueError: The job has no such device, or a GPU and no precision.
        """
        has: Device = "cuda" if self.gpus else "cpu"
        check_choice("device", device, ("auto", "cpu", "cuda"))
        if device not in ("auto", has):
            raise ValueError(f"device is {device!r} but slurm.gpus is {self.gpus}: a job then has {has!r}. Change one.")
        if has == "cuda" and precision == "auto":
            raise ValueError(
                "precision is 'auto', but the GPUs of the jobs cannot be checked here: choose bfloat16 or float32."
            )
        return has

    def flags(self, cpus: int) -> dict[str, object]:
        """The options of sbatch."""
        flags: dict[str, object] = {"time": self.time, "cpus-per-task": cpus, "requeue": True}
        flags |= {name: getattr(self, name) for name in ("partition", "account", "qos", "constraint")}
        flags |= {"gpus-per-node": self.gpus or None, "mem": None if self.memory is None else f"{self.memory}G"}
        return {name: value for name, value in flags.items() if value is not None}


NO_SLURM = Slurm()


@dataclass(frozen=True)
class SearchGrid:
    """Values to try, in all combinations.

    Attributes:
        batch_size: Texts per step.
        learning_rate: Peak learning rate, at the end of the warm-up.
        epochs: Passes over the training texts.
        seed: Seeds.

    Raises:
        ValueError: A value is given twice.
    """

    batch_size: tuple[int, ...] = ()
    learning_rate: tuple[float, ...] = ()
    epochs: tuple[float, ...] = ()
    seed: tuple[int, ...] = ()

    def __post_init__(self):
        for name, values in self.values().items():
            if len(set(values)) < len(values):
                raise ValueError(
                    f"search.{name} is {' '.join(map(str, values))}, with a repeated value: leave the repetition out."
                )

    def __bool__(self) -> bool:
        return bool(self.values())

    def values(self) -> dict[str, tuple[float, ...]]:
        """The given values by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name)}

    def trials(self) -> list[dict[str, float]]:
        """Each combination."""
        names = self.values()
        return [dict(zip(names, values, strict=True)) for values in product(*names.values())]


# The grid of the paper for MRPC.
PAPER_GRID = SearchGrid(batch_size=(8, 16, 32), learning_rate=(2e-5, 3e-5, 4e-5, 5e-5))
NO_GRID = SearchGrid()


@dataclass(frozen=True)
class FinetuneOptions(RunOptions):
    """Fine-tune a model, choose its best checkpoint on the validation split, evaluate it, and write its predictions.

    Attributes:
        task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli or imdb. Leave it out for your own texts.
        model: Folder of an encoder with its tokenizer, or OWNER/NAME: of this library, a published Nyströmformer, or
            any encoder of transformers.
        data: GLUE's folder of the task; or files named train, dev and test (.tsv, .csv, .jsonl, .parquet, may be
            compressed); or a folder saved by Hugging Face datasets.
        to: Folder of the run. Default: runs/finetune-TASK-MODEL-ATTENTION-seedSEED.
        attention: Attention method; "softmax" is exact attention. Default: the model's own attention.
        options: Options of the method.
        plan: Plan from `nystrom inspect --budget`, with a method for each layer, in place of one method for all.
        text_field: Column of the texts, or of the first text of each pair. Default: the usual names.
        label_field: Column of the labels.
        pair_field: Column of the second text of each pair. Without it, your own data are single texts.
        labels: Whether the labels of your own data are classes or numbers; "auto" means numbers if any is not an
            integer.
        val_share: Share of the training texts to hold out for validation. Default: a tenth if there is no validation
            split.
        epochs: Passes over the training texts. Default: 4, unless steps is given.
        steps: Steps, in place of epochs.
        batch_size: Global batch size: texts per step, over all processes and accumulation steps.
        learning_rate: Peak learning rate, at the end of the warm-up.
        max_length: Truncation length of a text, or of a pair, in tokens. Default: 512, or the model's positions if
            fewer.
        warmup_steps: Steps of linear warm-up. Default: a tenth of all steps.
        evaluate_every: Steps between evaluations, each followed by a checkpoint. Default: once per epoch.
        search: Search batch sizes 8, 16, 32 and learning rates 2e-5, 3e-5, 4e-5, 5e-5, as the paper does for MRPC, and
            evaluate the run that is best on validation.
        grid: Other values to search.
        jobs: Trials of a search that run in parallel on a cluster. Default: all. On this machine they run one at a
            time.
        on: "local", or "slurm": one job per trial of a search, on the cluster of this machine, with one core unless
            threads is given. This process may end before the jobs; the same command waits for them again.
        slurm: Resources of each job.
    """

    task: str | None = None
    _: KW_ONLY
    model: str
    data: tuple[Path, ...] = field(compare=False)
    to: Path | None = field(default=None, compare=False)
    attention: str | None = None
    options: Mapping[str, object] | None = None
    plan: Path | None = field(default=None, compare=False)
    text_field: str | None = field(default=None, compare=False)
    label_field: str | None = field(default=None, compare=False)
    pair_field: str | None = field(default=None, compare=False)
    labels: Literal["auto", "classes", "numbers"] = field(default="auto", compare=False)
    val_share: float | None = field(default=None, compare=False)
    epochs: float | None = field(default=None, compare=False)
    steps: int | None = None
    batch_size: int = 32
    learning_rate: float = 3e-5
    max_length: int | None = None
    warmup_steps: int | None = None
    evaluate_every: int | None = None
    search: bool = field(default=False, compare=False)
    grid: SearchGrid = field(default=NO_GRID, compare=False)
    jobs: int | None = field(default=None, compare=False)
    on: Where = field(default="local", compare=False)
    slurm: Slurm = field(default=NO_SLURM, compare=False)

    def columns(self) -> dict[str, Any]:
        """The columns by name; None for the usual names."""
        return {name: getattr(self, name) for name in ("text_field", "label_field", "pair_field")}

    def changed(self, values: Mapping[str, float]) -> "FinetuneOptions":
        """A copy with other values for the names in `SearchGrid`."""
        others: dict[str, Any] = dict(values)
        return replace(self, **({"steps": None} if "epochs" in others else {}), **others)


@dataclass(frozen=True)
class HealOptions(ConvertOptions, RunOptions):
    """Convert a model, and let its attention learn from the exact model; a model that became worse is not kept.

    Attributes:
        source: A model that can be converted; in another model of transformers, a decoder too, the attention alone is
            replaced.
        to: Folder for the new model. Checkpoints, curves and rows go to the folder TO-run beside it.
        texts: Files or folders of texts to heal on: plain text, or rows with a column of texts; may be compressed.
        text_field: Column of the texts. Default: the usual names.
        learn: Weights that learn: "queries-keys"; "attention", the attention blocks; "all" weights of the layers, which
            needs steps of the whole; or "adapters" of low rank on these, by PEFT, added to the weights at the end.
        whole: Share of the steps, the last ones, in which the whole model learns; before, each layer learns alone.
        length: Tokens at which a text is cut. Default: the longest input of the new model, but at most 8,192.
        shortest: Tokens of the shortest text to use. Default: a quarter of length.
        held_out: Texts that are held out, to measure the error.
        steps: Steps; fewer if the error of the held-out texts stops falling.
        batch_size: Texts per step, over all processes and accumulation steps.
        learning_rate: Peak learning rate, at the end of the warm-up.
        warmup_steps: Steps of linear warm-up. Default: a tenth of all steps.
        evaluate_every: Steps between measurements of the error, each with a checkpoint. Default: a tenth of all steps.
    """

    source: Path = field(compare=False)
    to: Path = field(compare=False)
    _: KW_ONLY
    texts: tuple[Path, ...] = field(default=(), compare=False)
    text_field: str | None = field(default=None, compare=False)
    learn: Learn = "attention"
    whole: float = 0.0
    length: int | None = None
    shortest: int | None = None
    held_out: int = 8
    steps: int = 200
    batch_size: int = 1
    learning_rate: float = 3e-4
    warmup_steps: int | None = None
    evaluate_every: int | None = None

    def __post_init__(self):
        ConvertOptions.__post_init__(self)
        RunOptions.__post_init__(self)
        check_choice("learn", self.learn, get_args(Learn))
        check_at_least("held_out", self.held_out, 1)
        if not 0 <= self.whole <= 1:
            raise ValueError(f"whole is {self.whole!r}; expected a share of the steps, from 0 to 1.")


@dataclass(frozen=True)
class EvaluateOptions(Columns, Machine):
    """Evaluate a saved model on all samples of one split.

    Attributes:
        task: Task, such as "listops".
        model: Folder of a saved model, such as RUN/best.
        data: Prepared data, or your own texts, as for `nystrom train`.
        split: train, val or test.
        batch_size: Samples per batch; affects only speed and memory.
    """

    task: str
    _: KW_ONLY
    model: Path
    data: Path
    split: str = "test"
    batch_size: int = 64


@dataclass(frozen=True, kw_only=True)
class EvaluatePretrainedOptions(Machine):
    """Evaluate a pretrained model on held-out documents.

    Attributes:
        model: Folder of a pretrained model, such as RUN/best of `nystrom pretrain`.
        data: Folder made by `nystrom data prepare mlm-sop`.
        length: Tokens of an instance. Default: the positions of the model.
        instances: Maximum number of held-out instances; the same instances as in the evaluations of a run.
        batch_size: Instances per batch; affects only speed and memory.
    """

    model: Path
    data: Path
    length: int | None = None
    instances: int = INSTANCES
    batch_size: int = 16


@dataclass(frozen=True, kw_only=True)
class PredictOptions(Machine):
    """Write the label of each text with its probability, or its number, one row per text, in order.

    Attributes:
        model: Folder of a fine-tuned model, such as RUN/best.
        data: The texts: a .txt file with one text per line, or .tsv, .csv, .jsonl, .parquet; may be compressed.
        to: File to write, .tsv, .csv or .jsonl; must not exist yet. Default: standard output.
        text_field: Column of the texts, or of the first text of each pair. Default: that of the model's task.
        pair_field: Column of the second text of each pair.
        batch_size: Texts at a time; affects only speed and memory.
        threads: CPU threads. Default: torch's choice.
    """

    model: str
    data: Path
    to: Path | None = None
    text_field: str | None = None
    pair_field: str | None = None
    batch_size: int = 32
    threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class Resolved(Steps, RunOptions):
    """The settings of a run: options of which each has its value, and what they follow from.

    Attributes:
        attention: Method.
        options: Options of the method that differ from its defaults.
        log_every: Steps between points of the training curve.
        processes: Processes.
        fingerprint: The model that the run starts from, see `nystrom.models.files.model_fingerprint`; None for none.
    """

    attention: str
    options: Mapping[str, object]
    log_every: int
    processes: int = 1
    fingerprint: str | None = None
    # Names in run.json that differ from those here, and what runs had before a setting existed.
    in_file: ClassVar[Mapping[str, str]] = MappingProxyType({"fingerprint": "weights"})
    at_first: ClassVar[dict[str, Any]] = {}

    def __post_init__(self):
        super().__post_init__()
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} but steps is {self.steps}, so the learning rate would never be "
                "reached: use a shorter warm-up, or more steps."
            )
        if self.evaluate_every % self.log_every:
            raise ValueError(
                f"log_every is {self.log_every} but evaluate_every is {self.evaluate_every}; expected a divisor of it, "
                "so that a resumed run logs the same means."
            )
        if self.processes % self.context_parallel:
            raise ValueError(
                f"context_parallel is {self.context_parallel} but processes is {self.processes}; expected groups of "
                f"{self.context_parallel}: start a multiple of them, such as torchrun --nproc-per-node "
                f"{self.context_parallel} -m nystrom_lab."
            )
        if self.batch_size % (self.groups * self.accumulation):
            who = "processes" if self.context_parallel == 1 else f"groups of {self.context_parallel} processes"
            raise ValueError(
                f"batch_size is {self.batch_size} but {self.groups} {who} share it, each in accumulation = "
                f"{self.accumulation} parts; expected a multiple of {self.groups * self.accumulation}."
            )

    @property
    def groups(self) -> int:
        """Number of groups of processes that share samples; all processes if samples are not split."""
        return self.processes // self.context_parallel

    @property
    def part_size(self) -> int:
        """Samples per process and accumulation step, of which it may hold a piece."""
        return self.batch_size // (self.groups * self.accumulation)

    @classmethod
    def recorded(cls) -> dict[str, str]:
        """The fields that determine the result, each with its name in run.json."""
        return {entry.name: cls.in_file.get(entry.name, entry.name) for entry in fields(cls) if entry.compare}

    def record(self) -> dict[str, Any]:
        """The settings as run.json has them."""
        values = {name: getattr(self, field_name) for field_name, name in self.recorded().items()}
        return json.loads(json.dumps(values, default=str))

    def differences(self, before: Mapping[str, Any]) -> list[str]:
        """The differences from the record of an earlier run, as "name is this here but was that"."""
        now = self.record()
        first = {entry.name: entry.default for entry in fields(self) if entry.default is not MISSING} | {
            **self.at_first
        }
        first = {name: first[own] for own, name in self.recorded().items() if own in first}
        before = {**json.loads(json.dumps(first)), **before}
        # Ignore two settings of version 0.3: track_error, which changed no weight, and ema where it was off.
        before = {name: value for name, value in before.items() if name != "track_error" and (name != "ema" or value)}
        models, changed = (now["weights"], before["weights"]), list[str]()
        if all(isinstance(model, str) for model in models):
            from nystrom.models.files.model_fingerprint import changed_parts

            changed += [f"the {part} of its model changed" for part in changed_parts(*models)]
            del now["weights"], before["weights"]
        return changed + [
            f"{name} is {self.shown(name, now.get(name))} but was {self.shown(name, before.get(name))}"
            for name in sorted({*now, *before})
            if now.get(name) != before.get(name)
        ]

    def shown(self, name: str, value: Any) -> str:
        """A recorded setting in the user's terms."""
        return repr(value)


def command_line(words: Sequence[str], processes: int) -> str:
    """The command of these words after `nystrom`, without the machine's folders."""
    start = ["nystrom"] if processes == 1 else ["torchrun", "--nproc-per-node", str(processes), "-m", "nystrom_lab"]
    return shlex.join([*start, *(Path(word).name if os.path.isabs(word) else word for word in words)])


def option_words(named: Mapping[str, object]) -> list[str]:
    """Options as words: `--name value`, the name alone for True, several values for a tuple, nothing for None."""
    words: list[str] = []
    for name, value in named.items():
        if value is not None:
            words.append(f"--{FLAGS.get(name, name).replace('_', '-')}")
        if value is not None and value is not True:
            words += map(str, value) if isinstance(value, tuple) else [str(value)]
    return words


def words_of(options: Any, *, prefix: str = "options.") -> list[str]:
    """The non-default options of a command, as words, plus those that always affect the result.

    Args:
        options: An instance of the command's options class; positional arguments are left out.
        prefix: Prefix of the options of the method.
    """
    named: dict[str, Any] = {}
    for name, parameter in parameters_of(type(options)).items():
        value = getattr(options, name)
        flag = parameter.kind is parameter.KEYWORD_ONLY and name not in _WHERE
        if flag and (name in _ALWAYS or value != parameter.default):
            named[name] = value
    named |= {f"{prefix}{name}": value for name, value in (named.pop("options", None) or {}).items()}
    if (grid := named.pop("grid", None)) is not None:
        named |= {f"search.{name}": values for name, values in grid.values().items()}
    return option_words(named)


# A command that reproduces a run names these even at their default, which another version may change.
_ALWAYS = ("preset", "seed", "batch_size", "learning_rate", "device", "precision")
# Options of where and when a run takes place.
_WHERE = ("resume", "jobs", "on", "slurm")
