"""The settings of a healing: the options, the method and length of the new model, and what follows from the steps."""

from dataclasses import dataclass, field, fields
from typing import Any

from nystrom.attention.plan import PLAN, read_plan
from nystrom.checks import check_at_least
from nystrom_lab.config import HealOptions, Resolved

# Tokens of a text where the new model has no limit, or one beyond.
MOST = 8192


@dataclass(frozen=True)
class HealSettings(Resolved, HealOptions):
    """Everything that determines the result of a healing, except the texts and the weights."""

    length: int = field(kw_only=True)
    shortest: int = field(kw_only=True)

    @property
    def layer_steps(self) -> int:
        """The steps in which each layer learns alone, the first ones."""
        return round(self.steps * (1 - self.whole))

    @property
    def before_last_stage(self) -> int:
        """The steps before those in which a run may stop."""
        return 0 if self.layer_steps == self.steps else self.layer_steps


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
