"""Convert a model, and let the heads that matter most on a user's texts attend exactly."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nystrom.attention.method_names import sized_name
from nystrom.attention.plan import PLAN
from nystrom.command_options import ConvertOptions
from nystrom.inspection.chosen_heads import choose_exact_heads
from nystrom.integrations.bert_names import positions_of
from nystrom.integrations.convert import Conversion, convert
from nystrom.models.files.folder import check_fresh
from nystrom.temporary import scratch_folder
from nystrom_lab.data.language.encoder_texts import hold_out, load_encoder, read_batches, read_prose
from nystrom_lab.data.language.tokenizer import load_tokenizer
from nystrom_lab.training.run_progress import no_file_bars

# Tokens of a text: exact attention is cheap there, and methods approximate. The heads are those of longer texts, too.
_LENGTH, _TEXTS, _MOST = 2048, 4, 4


def convert_calibrated(request: ConvertOptions, texts: Sequence[Path]) -> tuple[Conversion, str]:
    """Convert a model, with a plan of at most four exact heads in its configuration, chosen on these texts.

    Returns:
        The conversion, and a line that names the heads and the errors of the hidden states.

    Raises:
        ValueError: The cases of a conversion; a plan in addition, too little text, or a model without one method for
            all layers.
    """
    if request.plan is not None:
        raise ValueError(
            "plan sets the method of each layer and its exact heads, and calibrate chooses heads: leave one out."
        )
    check_fresh(request.to)
    prose = read_prose(texts)
    with no_file_bars(), scratch_folder() as around:
        made, file = around / "converted", around / "plan.json"
        convert(replace(request, to=made))
        model = load_encoder(made)
        config: Any = model.config
        if config.attention == PLAN:
            raise ValueError(
                f"{request.source} has a plan, and calibrate chooses exact heads beside one method: name it with "
                "--attention."
            )
        length = min(positions_of(config) or _LENGTH, _LENGTH)
        batches = read_batches(prose, load_tokenizer(made), model, length=length, num_texts=_TEXTS)
        by, held_out = hold_out(batches)
        plan = choose_exact_heads(
            model, by, config.attention, config.attention_options, num_exact_heads=_MOST, held_out=held_out
        )
        told = told_of_heads(plan.measurements, sized_name(config.attention, config.attention_options)[0])
        if not plan.exact_heads:
            return convert(request), told
        plan.write(file)
        taps = config.conv_kernel_size
        planned = replace(request, attention=None, options=None, num_landmarks="auto", plan=file, conv_kernel_size=taps)
        return convert(planned), told


def told_of_heads(measured: Mapping[str, Any], method: str) -> str:
    """The exact heads and the errors of the hidden states, in a line."""
    without, tokens = measured["error without exact heads"], measured["tokens"]
    if not without:
        return f"exact heads: none, since {method} is exact at {tokens} tokens: convert to more positions or fewer keys"
    heads = ", ".join(f"{place} ({share:.0%})" for place, share in measured["exact heads"].items())
    if not heads:
        return f"exact heads: none makes much of the error, {without:.3f} in the hidden states at {tokens} tokens"
    return (
        f"exact heads, as layer.head with their share of the error: {heads}; at {tokens} tokens the hidden states have "
        f"a relative error of {measured['error']:.3f}, {without:.3f} without them; on a text not used to choose them, "
        f"{measured['held-out error']:.3f} and {measured['held-out error without exact heads']:.3f}"
    )
