"""Convert a model, and let its attention learn from the exact model, on a user's texts without labels.

Options and texts are checked here, before torch is imported; what learns, and how, is in
`nystrom_lab.training.heal_model`.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from nystrom.attention.plan import PLAN, read_plan
from nystrom.checks import check_at_least
from nystrom.command_options import taking
from nystrom.whole_files import check_fresh, check_place
from nystrom_lab.config import HealOptions, Resolved, asked_words
from nystrom_lab.data.sources.corpora import find_corpora
from nystrom_lab.training.hardware import usable_device, usable_precision
from nystrom_lab.training.run_folder import RunFolder

# Characters of a token, at least, in texts that are read: those of more are cut before they are encoded.
_CHARACTERS = 16
# Tokens of a text where the new model has no limit, or one beyond.
MOST = 8192


@dataclass(frozen=True)
class HealSettings(Resolved, HealOptions):
    """Everything that determines the result of a healing, except the texts and the weights."""

    @property
    def layer_steps(self) -> int:
        """The steps in which each layer learns alone, the first ones."""
        return round(self.steps * (1 - self.whole))

    @property
    def before_last_stage(self) -> int:
        """The steps before those in which a run may stop."""
        return 0 if self.layer_steps == self.steps else self.layer_steps


@taking(HealOptions)
def heal(asked: HealOptions) -> Path:
    """Convert a model, and let its attention learn from the exact model; a model that became worse is not kept.

    A run can be interrupted at any time and continued by the same command with `resume`.

    Returns:
        The folder of the new model. Its card names the error on the held-out texts before and after; rows, curves and
        checkpoints are in the folder of the run beside it.

    Raises:
        ValueError: A model that cannot be converted or learned from, no text long enough, or another invalid option.
        FloatingPointError: The states of the exact model, the loss or a weight are not finite.
    """
    if not asked.texts:
        raise ValueError("texts names nothing: name files or folders of texts, such as those that the model will read.")
    asked = replace(asked, source=Path(asked.source), to=Path(asked.to), texts=tuple(map(Path, asked.texts)))
    device = usable_device(asked.device)
    asked = replace(asked, device=device, precision=usable_precision(asked.precision, device))
    if asked.precision == "float16":
        raise ValueError(
            "precision is 'float16', whose gradients vanish at such small errors: use bfloat16 or float32."
        )
    if asked.context_parallel != 1:
        raise ValueError(
            f"context_parallel is {asked.context_parallel}; expected 1: the exact model reads whole texts."
        )
    check_place(asked.to)
    run = RunFolder(asked.to.with_name(f"{asked.to.name}-run"))
    if not (run.is_started and run.is_finished):
        check_fresh(asked.to)
    # Before anything is converted: what is not there, or has no text, is refused.
    find_corpora(asked.texts, text_field=asked.text_field)
    words = ["convert", str(asked.source), "--heal", *map(str, asked.texts), "--to", str(asked.to)]
    words += asked_words(replace(asked, texts=()), options="")

    from nystrom_lab.training.heal_model import heal_model

    heal_model(asked, run, words, resume=run.is_resumed(asked.resume))
    return asked.to


def planned(asked: HealOptions) -> tuple[str | None, dict[str, object]]:
    """The requested method, or a plan, and its options, where the attention alone is replaced."""
    if asked.plan is not None:
        return PLAN, read_plan(asked.plan).options
    sizes = {} if asked.num_landmarks == "auto" else {"num_landmarks": asked.num_landmarks}
    return asked.attention, {**(asked.options or {}), **sizes}


def settle(asked: HealOptions, *, attention: str, options: dict[str, object], longest: int | None, fingerprint: str,
           processes: int) -> HealSettings:  # fmt: skip
    """Resolve and check all settings that determine the result of a run.

    Args:
        longest: The longest input of the new model; None if there is no limit.
        fingerprint: The fingerprint of the source.

    Raises:
        ValueError: An invalid value.
    """
    length = min(longest or MOST, MOST) if asked.length is None else asked.length
    check_at_least("length", length, 8)
    if longest is not None and length > longest:
        raise ValueError(
            f"length is {length} but the new model has {longest} positions: take fewer, or more with "
            "--max-position-embeddings."
        )
    shortest = length // 4 if asked.shortest is None else asked.shortest
    check_at_least("steps", asked.steps, 1)
    every = max(1, asked.steps // 10) if asked.evaluate_every is None else asked.evaluate_every
    given: dict[str, Any] = {entry.name: getattr(asked, entry.name) for entry in fields(HealOptions)}
    given |= {
        "attention": attention,
        "options": options,
        "length": length,
        "shortest": shortest,
        "warmup_steps": asked.steps // 10 if asked.warmup_steps is None else asked.warmup_steps,
        "evaluate_every": every,
        "log_every": every,
    }
    settings = HealSettings(**given, fingerprint=fingerprint, processes=processes)
    if settings.learn == "all" and settings.layer_steps == settings.steps:
        raise ValueError(
            f"learn is 'all' and whole {settings.whole}, but where each layer learns alone, its attention block is all "
            "that does: give --whole a larger share of the steps, or take learn 'attention'."
        )
    return settings


def read_texts(asked: HealOptions, *, length: int) -> Iterator[str]:
    """The texts, each once, cut to more characters than `length` tokens have."""
    corpora, _ = find_corpora(asked.texts, text_field=asked.text_field)
    most, known = length * _CHARACTERS, set()
    for corpus in corpora:
        held = ""
        for piece in corpus.pieces():
            if piece.begins and held.strip():
                yield from _new(held[:most], known)
                held = ""
            if len(held) < most:
                held += piece.text.decode("utf-8", errors="replace")
        if held.strip():
            yield from _new(held[:most], known)


def _new(text: str, known: set[bytes]) -> Iterator[str]:
    """A text that was not there before: one that is held out must not be learned."""
    digest = hashlib.sha256(text.encode()).digest()
    if digest not in known:
        known.add(digest)
        yield text
