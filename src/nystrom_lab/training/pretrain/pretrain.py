"""Pretrain an encoder on masked words and sentence order, and score one.

On the same machine and with the same number of processes, a run that was killed and resumed ends with the weights and
the curves of one that was not. What is wrong with names and numbers is found before torch is imported; what is wrong
with the data and the model that a run starts from is found in `nystrom_lab.training.pretrain.pretrain_model`, before it
starts.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from nystrom.checks import check_at_least
from nystrom.command_options import taking
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.command import asked_words
from nystrom_lab.training.hardware import Device, Precision, usable_device, usable_precision
from nystrom_lab.training.options import INSTANCES, PretrainOptions
from nystrom_lab.training.presets.pretraining import find_pretraining
from nystrom_lab.training.run.folder import RunFolder


@taking(PretrainOptions)
def pretrain(asked: PretrainOptions) -> Path:
    """Pretrain an encoder on masked words and sentence order, and keep the checkpoint best on held-out documents.

    Arguments that are not given take the preset's values. Under torchrun the processes share each batch. A run can be
    interrupted at any time and continued with `resume`.

    Returns:
        The folder of the run; the best model is in its folder best, with the tokenizer of the data.

    Raises:
        ValueError: A name, number, folder, model, device or precision cannot be used; raised before training.
        FloatingPointError: The loss or a weight is no longer finite.
    """
    base = find_pretraining(asked.preset)
    check_at_least("workers", asked.workers, 0)
    shown = asked.attention or ("as-it-is" if asked.model else "nystrom")
    folder = asked.to or Path("runs") / f"pretrain-{asked.preset}-{shown}-seed{asked.seed}"
    run, device = RunFolder(Path(folder)), usable_device(asked.device)
    asked = replace(asked, to=run.path, device=device, precision=usable_precision(asked.precision, device))

    from nystrom_lab.training.pretrain.pretrain_model import pretrain_model

    words = ["pretrain", *asked_words(asked)]
    pretrain_model(base, run, replace(asked, resume=run.is_resumed(asked.resume)), words=words)
    return run.path


@dataclass(frozen=True, kw_only=True)
class EvaluatePretrainedOptions:
    """Options of the score of a pretrained model.

    Attributes:
        model: Folder of a model of `nystrom pretrain`, such as RUN/best.
        data: What `nystrom data prepare mlm-sop` made.
        length: Tokens of an instance; the positions of the model if not given.
        instances: Held-out instances, at most; the same as in the evaluations of a run.
        batch_size: Instances at a time; affects only speed and memory.
        precision: "auto" is bfloat16 autocast on an accelerator that has it, and float32 elsewhere.
        device: "auto" takes an accelerator if there is one.
    """

    model: Path
    data: Path
    length: int | None = None
    instances: int = INSTANCES
    batch_size: int = 16
    precision: Precision = "auto"
    device: Device = "auto"


@taking(EvaluatePretrainedOptions)
def evaluate_mlm_sop(asked: EvaluatePretrainedOptions) -> list[Row]:
    """Score a pretrained model on held-out documents.

    Returns:
        Rows of `nystrom_lab.measure.rows`: of the masked words the accuracy, loss and perplexity, of the order the
        accuracy and loss. Accuracies are between 0 and 1, with their 95 % intervals.

    Raises:
        ValueError: A folder, number, device or precision that cannot be used, a model that was not pretrained on this
            task, or data of another vocabulary.
    """
    check_at_least("batch_size", asked.batch_size, 1)
    check_at_least("instances", asked.instances, 1)
    device = usable_device(asked.device)
    precision = usable_precision(asked.precision, device)

    from nystrom_lab.training.pretrain.pretrain_outputs import score_folder

    return score_folder(
        Path(asked.model),
        Path(asked.data),
        length=asked.length,
        instances=asked.instances,
        batch_size=asked.batch_size,
        device=device,
        precision=precision,
    )
