"""Pretrain an encoder on masked words and sentence order, and evaluate one.

On the same machine and with the same number of processes, a run that was killed and resumed ends with the weights and
the curves of one that was not. Errors in names and numbers are found before torch is imported; errors in the data and
the starting model are found in `nystrom_lab.training.pretrain.masked_language`, before training starts.
"""

from dataclasses import replace
from pathlib import Path

from nystrom.checks import check_at_least
from nystrom.command_options import taking
from nystrom_lab.config import EvaluatePretrainedOptions, PretrainOptions, asked_words
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.hardware import usable_device, usable_precision
from nystrom_lab.training.pretrain.presets import find_pretraining
from nystrom_lab.training.run.folder import RunFolder


@taking(PretrainOptions)
def pretrain(asked: PretrainOptions) -> Path:
    """Pretrain an encoder on masked words and sentence order; keeps the checkpoint that is best on held-out documents.

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

    from nystrom_lab.training.pretrain.masked_language import pretrain_model

    words = ["pretrain", *asked_words(asked)]
    pretrain_model(base, run, replace(asked, resume=run.is_resumed(asked.resume)), words=words)
    return run.path


@taking(EvaluatePretrainedOptions)
def evaluate_mlm_sop(asked: EvaluatePretrainedOptions) -> list[Row]:
    """Evaluate a pretrained model on held-out documents.

    Returns:
        Rows of `nystrom_lab.measure.rows`: accuracy, loss and perplexity of the masked words, and accuracy and loss of
        the sentence order. Accuracies are between 0 and 1, with their 95 % intervals.

    Raises:
        ValueError: An invalid folder, number, device or precision, a model that was not pretrained on this task, or
            data with another vocabulary.
    """
    check_at_least("batch_size", asked.batch_size, 1)
    check_at_least("instances", asked.instances, 1)
    device = usable_device(asked.device)
    precision = usable_precision(asked.precision, device)

    from nystrom_lab.training.pretrain.masked_language import score_folder

    return score_folder(
        replace(asked, model=Path(asked.model), data=Path(asked.data), device=device, precision=precision)
    )
