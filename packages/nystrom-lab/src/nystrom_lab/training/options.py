"""The options of training commands: a documented class for each command, and shared base classes.

They define command lines, function arguments, the processes of a grid and the commands recorded in rows.
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
        steps: Training steps. The warm-up of a shorter run shrinks in proportion.
        batch_size: Global batch size: samples per step, over all processes and accumulation steps.
        learning_rate: Peak learning rate, at the end of the warm-up.
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
        """The changes to the preset, by name; None if unchanged."""
        kind = PresetChanges if isinstance(self, PresetChanges) else LoopChanges
        return {entry.name: getattr(self, entry.name) for entry in fields(kind)}


@dataclass(frozen=True, kw_only=True)
class PresetChanges(LoopChanges):
    """Further changes to a preset of the Long Range Arena.

    Attributes:
        positions: "learned", a table; "rotary", queries and keys rotated by their position; or "none".
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
        schedule: The learning rate after the warm-up: "linear" or "cosine" to 0, "constant", or "rsqrt", the inverse
            square root of the step.
        clip_norm: Gradients are clipped to this norm; 0 for no clipping.
        adam_betas: Betas of AdamW, the decay of its running means.
        weight_decay: Weight decay of AdamW, on all weights except biases and norms.
        label_smoothing: Label smoothing in training: the share spread evenly over the classes.
        ema: Decay of an exponential moving average of the weights, which is evaluated and saved in their place; 0 for
            none.
        augment: Augment training samples anew in each pass: ListOps arguments reordered, texts cropped, images
            mirrored, shifted and scaled (Pathfinder: mirrored).
        denoise: Weight of a denoising loss, predicting every token of an input that is 30 % corrupted; 0 for clean
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
    """Options of how a training is run.

    Attributes:
        seed: Seed of initial weights, the order of samples, random draws and dropout.
        resume: Continue the run in the folder, from its last complete checkpoint.
        accumulation: Gradient-accumulation steps, which save memory; evaluations are split likewise.
        context_parallel: Processes that split the tokens of each sample, for samples that do not fit in one process.
        precision: "auto" is bfloat16 autocast on an accelerator that has it, and float32 elsewhere.
        device: "auto" uses an accelerator if there is one.
        threads: CPU threads. Default: torch's choice.
        timeout: Seconds to wait for the other processes; then the run ends, and can be resumed.
    """

    seed: int = 0
    resume: bool = False
    accumulation: int = 1
    context_parallel: int = 1
    precision: Precision = "auto"
    device: Device = "auto"
    threads: int | None = None
    timeout: int = TIMEOUT

    def __post_init__(self):
        check_at_least("timeout", self.timeout, 1)
        if self.threads is not None:
            check_at_least("threads", self.threads, 1)


@dataclass(frozen=True)
class TrainOptions(PresetChanges, RunOptions):
    """Options of a training on a task; those not given are the preset's.

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
        text_field: Column of the texts, or of the first text of each pair, in your own files. Default: the usual names.
        label_field: Column of the labels in your own files.
        pair_field: Column of the second text of each pair, for retrieval.
        max_length: Longest sequence in tokens, and number of positions of the model, in place of the preset's; the
            default data are then data/TASK-LENGTH. Not for images, whose data have a fixed size.
        to: Folder of the run. Default: runs/TASK-ATTENTION-PRESET-seedSEED.
        conv_kernel_size: Kernel size of the skip convolution of the values, added to the attention; 0 for none.
        compile: Compile the model, and pad every batch to the model's positions, so that all steps use one graph.
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
    """Options of a pretraining on masked words and sentence order; those not given are the preset's.

    Attributes:
        data: Folder made by `nystrom data prepare mlm-sop`; usable for instances of any length.
        preset: "bert-small" or "bert-base", as published; "longer", which gives a trained model more positions; or
            "demo", for two cores.
        attention: Attention method, see `nystrom methods`. Default: that of the model, or nystrom.
        options: Options of the method.
        model: Folder of a trained model to start from: a BERT or RoBERTa, a Nyströmformer, or RUN/best.
        to: Folder of the run. Default: runs/pretrain-PRESET-ATTENTION-seedSEED.
        length: Tokens of an instance.
        num_hidden_layers: Layers.
        hidden_size: Width of a token.
        num_attention_heads: Heads.
        intermediate_size: Width inside the feed-forward block.
        conv_kernel_size: Kernel size of the skip convolution of the values, added to the attention; 0 for none.
        instances: Maximum number of held-out instances per evaluation; the same in all runs on the data.
        workers: Processes that load batches ahead; affects only speed.
        compile: Compile the encoder, and pad every batch to `length`, so that all steps use one graph.
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
