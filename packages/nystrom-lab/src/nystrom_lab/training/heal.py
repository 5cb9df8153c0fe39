"""Convert a model, and let its attention learn from the exact model, on a user's texts without labels.

Options and texts are checked here, before torch is imported; what learns, and how, is in
`nystrom_lab.training.heal_model`.
"""

from dataclasses import replace
from pathlib import Path

from nystrom.whole_files import check_fresh, check_place
from nystrom_lab.config import HealOptions, words_of
from nystrom_lab.data.sources.corpora import find_corpora
from nystrom_lab.training.hardware import usable_device, usable_precision
from nystrom_lab.training.run_folder import RunFolder


def heal(options: HealOptions) -> Path:
    """Convert a model, and let its attention learn from the exact model; a model that became worse is not kept.

    A run can be interrupted at any time and continued by the same command with `resume`.

    Returns:
        The folder of the new model. The card names the error on the held-out texts before and after; rows, curves and
        checkpoints are in the folder of the run beside it.

    Raises:
        ValueError: A model that cannot be converted or learned from, no text long enough, or another invalid option.
        FloatingPointError: The states of the exact model, the loss or a weight are not finite.
    """
    if not options.texts:
        raise ValueError("texts names nothing: name files or folders of texts, such as those that the model will read.")
    options = replace(options, source=Path(options.source), to=Path(options.to), texts=tuple(map(Path, options.texts)))
    device = usable_device(options.device)
    options = replace(options, device=device, precision=usable_precision(options.precision, device))
    if options.precision == "float16":
        raise ValueError(
            "precision is 'float16', whose gradients vanish at such small errors: use bfloat16 or float32."
        )
    if options.context_parallel != 1:
        raise ValueError(
            f"context_parallel is {options.context_parallel}; expected 1: the exact model reads whole texts."
        )
    check_place(options.to)
    run = RunFolder(options.to.with_name(f"{options.to.name}-run"))
    if not (run.is_started and run.is_finished):
        check_fresh(options.to)
    # Before anything is converted: what is not there, or has no text, is refused.
    find_corpora(options.texts, text_field=options.text_field)
    words = ["heal", str(options.source), "--to", str(options.to), *words_of(options, prefix="")]

    from nystrom_lab.training.heal_model import heal_model

    heal_model(options, run, words, resume=run.is_resumed(options.resume))
    return options.to
