"""The options of trainings: a documented class for each command, and what several of them share.

From these come command lines, the functions' own arguments, the processes of a grid and the commands in rows.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any

from nystrom.checks import Design, FeedForward, PooledNormKind, Pooling, PositionKind, check_at_least
from nystrom_lab.training.hardware import TIMEOUT, Device, Precision
from nystrom_lab.training.presets.recipe import LearningRateSchedule

# Held-out instances of a pretraining that are scored.
INSTANCES = 2048


@dataclass(frozen=True, kw_only=True)
class LoopChanges:
    """Changes to the preset's training; None leaves the preset's value.

    Attributes:
        steps: Steps. A shorter run has a warm-up shorter in proportion.
        batch_size: Global batch size: samples per step, over all processes and accumulation steps.
        learning_rate: Learning rate at the end of the warm-up.
        warmup_steps: Steps of linear warm-up.
        dropout: Dropout on the hidden states.
        evaluate_every: Steps between evaluations, each followed by a checkpoint.
        log_every: Steps between points of the training curve; divides evaluate_every.
    """

    steps: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    warmup_steps: int | None = None
    dropout: float | None = None
    evaluate_every: int | None = None
    log_every: int | None = None

    def changes(self) -> dict[str, Any]:
        """What is changed in the preset, by name; None for what is not."""
        kind = PresetChanges if isinstance(self, PresetChanges) else LoopChanges
        return {entry.name: getattr(self, entry.name) for entry in fields(kind)}


@dataclass(frozen=True, kw_only=True)
class PresetChanges(LoopChanges):
    """Further changes to a preset of the Long Range Arena.

    Attributes:
        positions: "learned", a table; "rotary", queries and keys turned by their position; or "none".
        rotary_share: Share of the width that turns, of rotary positions.
        rotary_across_heads: The angles of rotary positions are spread over the heads, from local to global ones.
        short_conv_kernel_size: Size of the convolutions of queries, keys and values before the method; 0 for none.
        pooling: What the classification head reads of the tokens: "mean", "first", "max", or "cls", a learned token
            before the first.
        pooled_norm: "batch" brings each channel of that to mean 0 and variance 1 over the samples that a process
            computes at once; or "none".
        feed_forward: "plain", "gated" by the activation (GEGLU, SwiGLU), or "glu", gated by the sigmoid.
        design: Classification head, dropout and initial values as in "transformers", in the papers' code ("authors") or
            in the "official" code of the Long Range Arena.
        drop_weights: Drop weights of exact and kernelized attention, which are then stored, in the design "authors";
            other methods have none to drop.
        schedule: The learning rate after the warm-up: "linear" or "cosine" to 0, "constant", or "rsqrt", the inverse
            root of the step.
        clip_norm: Gradients are clipped to this norm; 0 for no clipping.
        adam_betas: Decay of AdamW's running means.
        weight_decay: Weight decay of AdamW, on all weights but biases and norms.
        label_smoothing: Share of a label that is spread evenly over the classes, in training.
        ema: Decay of a running mean of the weights, which is evaluated and kept in their place; 0 for none.
        augment: Augment training samples anew in each pass: the arguments of ListOps in another order, texts cropped,
            pictures mirrored, shifted and scaled (Pathfinder: mirrored).
        denoise: Weight of the loss of predicting every token of an input of which 30 % is corrupted; 0 for clean
            inputs.
    """

    positions: PositionKind | None = None
    rotary_share: float | None = None
    rotary_across_heads: bool | None = None
    short_conv_kernel_size: int | None = None
    pooling: Pooling | None = None
    pooled_norm: PooledNormKind | None = None
    feed_forward: FeedForward | None = None
    design: Design | None = None
    drop_weights: bool | None = None
    schedule: LearningRateSchedule | None = None
    clip_norm: float | None = None
    adam_betas: tuple[float, float] | None = None
    weight_decay: float | None = None
    label_smoothing: float | None = None
    ema: float | None = None
    augment: bool | None = None
    denoise: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a training is run.

    Attributes:
        seed: Seed of new weights, the order of samples, random draws and dropout.
        resume: Continue the run in the folder, from its last complete checkpoint.
        accumulation: Gradient-accumulation steps, which save memory; evaluations are split likewise.
        context_parallel: Processes that share the tokens of each sample, for samples that do not fit into one.
        precision: "auto" is bfloat16 autocast on an accelerator that has it, and float32 elsewhere.
        device: "auto" takes an accelerator if there is one.
        track_error: Also record the error of attention against exact attention, estimated from a few queries; for
            models of this library.
        threads: Threads on the CPU; torch's choice if not given.
        timeout: Seconds that a process waits for the others; then the run ends, and can be resumed.
    """

    seed: int = 0
    resume: bool = False
    accumulation: int = 1
    context_parallel: int = 1
    precision: Precision = "auto"
    device: Device = "auto"
    track_error: bool = False
    threads: int | None = None
    timeout: int = TIMEOUT

    def __post_init__(self):
        check_at_least("timeout", self.timeout, 1)
        if self.threads is not None:
            check_at_least("threads", self.threads, 1)


@dataclass(frozen=True)
class TrainOptions(PresetChanges, RunOptions):
    """Options of a training on a task; what is not given is the preset's.

    Attributes:
        task: Task, such as "listops".
        attention: Attention method, see `nystrom methods`; "none" passes values through, to see what attention adds.
            That of the model, or nystrom.
        options: Options of the method.
        preset: "nystromformer" or "skyformer", as published, and "nystromformer-1000" or "skyformer-1000" for Text cut
            at 1,000 bytes; "official", that of the benchmark's own code; "modern", with what lifts attention since, or
            "modern-small", for one core; or "demo" for a few minutes on two cores. That of the model's run, or
            nystromformer.
        model: Encoder to start from, such as RUN/best of `nystrom pretrain TASK`: its settings and weights; the head
            is new.
        mask_share: Share of the tokens that are masked and predicted in place of the class; 0 to learn the class.
        data: Prepared data; data/TASK, or data/TASK-demo for the demo, which is made if it is missing and can be. A
            resumed run uses its own. For text also your own labelled texts (.csv, .tsv, .jsonl, or a folder of them),
            for retrieval your own pairs of texts; they are prepared under data/. For pathfinder pictures of any size:
            the model has a position for each pixel.
        text_field: Column of the texts, or of the first of each pair, in your own files; the usual names if not given.
        label_field: Column of the labels in your own files.
        pair_field: Column of the second text of each pair, for retrieval.
        max_length: Tokens of the longest sequence, and positions of the model, in place of the preset's; the default
            data are then data/TASK-LENGTH. Not for pictures, whose data have a size.
        to: Folder of the run; runs/TASK-ATTENTION-PRESET-seedSEED.
        conv_kernel_size: Size of the convolution of the values that is added to the attention; 0 for none.
        compile: Compile the model, and pad every batch to the model's positions, so that one graph serves all steps.
    """

    task: str
    _: KW_ONLY
    attention: str | None = None
    options: Mapping[str, object] | None = None
    preset: str | None = None
    model: Path | None = None
    mask_share: float = 0.0
    data: Path | None = None
    text_field: str | None = None
    label_field: str | None = None
    pair_field: str | None = None
    max_length: int | None = None
    to: Path | None = None
    conv_kernel_size: int | None = None
    compile: bool = False


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(LoopChanges, RunOptions):
    """Options of a pretraining on masked words and sentence order; what is not given is the preset's.

    Attributes:
        data: What `nystrom data prepare mlm-sop` made. It serves instances of any length.
        preset: "bert-small" or "bert-base", as published; "longer" gives a trained model more positions; "demo" is for
            two cores.
        attention: Method, a name of `nystrom methods`; that of the model, or nystrom.
        options: Options of the method.
        model: Folder of a trained model to start from: a BERT or RoBERTa, a Nyströmformer, or RUN/best.
        to: Folder of the run; runs/pretrain-PRESET-ATTENTION-seedSEED.
        length: Tokens of an instance.
        num_hidden_layers: Layers.
        hidden_size: Width of a token.
        num_attention_heads: Heads.
        intermediate_size: Width inside the feed-forward block.
        conv_kernel_size: Size of the convolution of the values that is added to the attention; 0 for none.
        instances: Held-out instances that an evaluation scores, at most; they are the same in all runs on the data.
        workers: Processes that load batches ahead; they change nothing but speed.
        compile: Compile the encoder, and pad every batch to `length`, so that one graph serves all steps.
    """

    data: Path
    preset: str = "bert-small"
    attention: str | None = None
    options: Mapping[str, object] | None = None
    model: Path | None = None
    to: Path | None = None
    length: int | None = None
    num_hidden_layers: int | None = None
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    intermediate_size: int | None = None
    conv_kernel_size: int | None = None
    instances: int = INSTANCES
    workers: int = 0
    compile: bool = False
