"""Pretrain an encoder on masked words and sentence order, and score one.

On the same machine and with the same number of processes, a run that was killed and resumed ends with the weights and
the curves of one that was not. What is wrong with names and numbers is found before torch is imported; what is wrong
with the data and the model that a run starts from is found in `nystrom_lab.training.pretrain.pretrain_model`, before it
starts.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from nystrom.checks import check_at_least
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.command import option_words
from nystrom_lab.training.hardware import TIMEOUT, Device, Precision, usable_device, usable_precision
from nystrom_lab.training.options import LoopChanges, RunOptions, taking
from nystrom_lab.training.presets.pretraining import find_pretraining
from nystrom_lab.training.run.folder import RunFolder

# Held-out instances that are scored.
INSTANCES = 2048


@taking(changes=LoopChanges, how=RunOptions)
def pretrain(
    *,
    data: Path,
    preset: str = "bert-small",
    attention: str | None = None,
    options: Mapping[str, object] | None = None,
    model: Path | None = None,
    to: Path | None = None,
    how: RunOptions,
    length: int | None = None,
    num_hidden_layers: int | None = None,
    hidden_size: int | None = None,
    num_attention_heads: int | None = None,
    intermediate_size: int | None = None,
    changes: LoopChanges,
    conv_kernel_size: int | None = None,
    instances: int = INSTANCES,
    workers: int = 0,
    compile: bool = False,
) -> Path:
    """Pretrain an encoder on masked words and sentence order, and keep the checkpoint best on held-out documents.

    Arguments that are not given take the preset's values. Under torchrun the processes share each batch. A run can be
    interrupted at any time and continued with `resume`.

    Args:
        data: What `nystrom data prepare mlm-sop` made. It serves instances of any length.
        preset: "bert-small" or "bert-base", as published; "longer" gives a trained model more positions; "demo" is for
            two cores.
        attention: Method, a name of `nystrom methods`; that of the model, or nystrom.
        options: Options of the method.
        model: Folder of a trained model to start from: a BERT or RoBERTa, a Nyströmformer, or RUN/best.
        to: Folder of the run; runs/pretrain-PRESET-ATTENTION-seedSEED.
        **how: How it runs.
        length: Tokens of an instance.
        num_hidden_layers: Layers.
        hidden_size: Width of a token.
        num_attention_heads: Heads.
        intermediate_size: Width inside the feed-forward block.
        **changes: What is changed in the preset.
        conv_kernel_size: Size of the convolution of the values that is added to the attention; 0 for none.
        instances: Held-out instances that an evaluation scores, at most; they are the same in all runs on the data.
        workers: Processes that make batches ahead; they change nothing but speed.
        compile: Compile the encoder, and pad every batch to `length`, so that one graph serves all steps.

    Returns:
        The folder of the run; the best model is in its folder best, with the tokenizer of the data.

    Raises:
        ValueError: A name, number, folder, model, device or precision cannot be used; raised before training.
        FloatingPointError: The loss or a weight is no longer finite.
    """
    given = {name: value for name, value in locals().items() if name not in ("options", "to", "changes", "how")}
    given |= changes.asdict() | {name: value for name, value in asdict(how).items() if name != "resume"}
    given = {name: value for name, value in given.items() if value != _DEFAULTS.get(name)}
    base = find_pretraining(preset)
    check_at_least("workers", workers, 0)
    shown = attention or ("as-it-is" if model else "nystrom")
    run = RunFolder(Path("runs") / f"pretrain-{preset}-{shown}-seed{how.seed}" if to is None else Path(to))
    device = usable_device(how.device)
    how = replace(how, device=device, precision=usable_precision(how.precision, device))
    given |= {"device": how.device, "precision": how.precision, "to": run.path}
    given |= {f"options.{name}": value for name, value in (options or {}).items()}

    from nystrom_lab.training.pretrain.pretrain_model import pretrain_model
    from nystrom_lab.training.pretrain.pretrain_settings import SIZES

    sizes = dict(zip(SIZES, (num_hidden_layers, hidden_size, num_attention_heads, intermediate_size), strict=True))
    pretrain_model(
        base,
        Path(data),
        run,
        how=replace(how, resume=run.is_resumed(how.resume)),
        model=None if model is None else Path(model),
        workers=workers,
        attention=attention,
        options=options,
        conv_kernel_size=conv_kernel_size,
        length=length,
        sizes=sizes,
        changes=changes.asdict(),
        instances=instances,
        compile=compile,
        words=["pretrain", *option_words(given)],
    )
    return run.path


# What need not be in the command that reproduces a run.
_DEFAULTS: dict[str, object] = {
    "accumulation": 1,
    "context_parallel": 1,
    "timeout": TIMEOUT,
    "instances": INSTANCES,
    "workers": 0,
    "compile": False,
    "track_error": False,
}


def evaluate_mlm_sop(
    *,
    model: Path,
    data: Path,
    length: int | None = None,
    instances: int = INSTANCES,
    batch_size: int = 16,
    precision: Precision = "auto",
    device: Device = "auto",
) -> list[Row]:
    """Score a pretrained model on held-out documents.

    Args:
        model: Folder of a model of `nystrom pretrain`, such as RUN/best.
        data: What `nystrom data prepare mlm-sop` made.
        length: Tokens of an instance; the positions of the model if not given.
        instances: Held-out instances, at most; the same as in the evaluations of a run.
        batch_size: Instances at a time; affects only speed and memory.
        precision: "auto" is bfloat16 autocast on an accelerator that has it, and float32 elsewhere.
        device: "auto" is an accelerator where there is one.

    Returns:
        Rows of `nystrom_lab.measure.rows`: of the masked words the accuracy, loss and perplexity, of the order the
        accuracy and loss. Accuracies are between 0 and 1, with their 95 % intervals.

    Raises:
        ValueError: A folder, number, device or precision that cannot be used, a model that was not pretrained on this
            task, or data of another vocabulary.
    """
    check_at_least("batch_size", batch_size, 1)
    check_at_least("instances", instances, 1)
    device = usable_device(device)  # pyright: ignore[reportAssignmentType]
    precision = usable_precision(precision, device)  # pyright: ignore[reportAssignmentType]

    from nystrom_lab.training.pretrain.pretrain_outputs import score_folder

    return score_folder(
        Path(model),
        Path(data),
        length=length,
        instances=instances,
        batch_size=batch_size,
        device=device,
        precision=precision,
    )
