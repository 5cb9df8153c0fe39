"""The settings of a healing: the options, the method and length of the new model, and what follows from the steps."""

from dataclasses import dataclass, field, fields
from typing import Any

from nystrom.attention.plan import PLAN, read_plan
from nystrom.checks import check_at_least
from nystrom_lab.config import HealOptions, Resolved
from nystrom_lab.training.hardware import processes

# Tokens of a text where the new model has no limit, or one beyond.
MOST = 8192


@dataclass(frozen=True)
class HealSettings(Resolved, HealOptions):
    """Everything that determines the result of a healing, except the texts and the weights."""

    length: int = field(kw_only=True)
    shortest: int = field(kw_only=True)

    @classmethod
    def resolve(
        cls,
        options: HealOptions,
        *,
        attention: str,
        of_method: dict[str, object],
        longest: int | None,
        fingerprint: str,
    ) -> "HealSettings":
        """Resolve and check all settings that determine the result of a run.

        Args:
            longest: The longest input of the new model; None if there is no limit.
            fingerprint: The fingerprint of the source.

        Raises:
            ValueError: An invalid value.
        """
        length = min(longest or MOST, MOST) if options.length is None else options.length
        check_at_least("length", length, 8)
        if longest is not None and length > longest:
            raise ValueError(
                f"length is {length} but the new model has {longest} positions: take fewer, or more with "
                "--max-position-embeddings."
            )
        shortest = length // 4 if options.shortest is None else options.shortest
        every = max(1, options.steps // 10) if options.evaluate_every is None else options.evaluate_every
        given: dict[str, Any] = {entry.name: getattr(options, entry.name) for entry in fields(HealOptions)}
        given |= {
            "attention": attention,
            "options": of_method,
            "length": length,
            "shortest": shortest,
            "warmup_steps": options.steps // 10 if options.warmup_steps is None else options.warmup_steps,
            "evaluate_every": every,
            "log_every": every,
        }
        settings = cls(**given, fingerprint=fingerprint, processes=processes())
        if settings.learn == "all" and settings.layer_steps == settings.steps:
            raise ValueError(
                f"learn is 'all' and whole {settings.whole}, but where each layer learns alone, its attention block "
                "is all that does: give --whole a larger share of the steps, or take learn 'attention'."
            )
        return settings

    @property
    def layer_steps(self) -> int:
        """The steps in which each layer learns alone, the first ones."""
        return round(self.steps * (1 - self.whole))

    @property
    def before_last_stage(self) -> int:
        """The steps before those in which a run may stop."""
        return 0 if self.layer_steps == self.steps else self.layer_steps


def planned(options: HealOptions) -> tuple[str | None, dict[str, object]]:
    """The requested method, or a plan, and its options, where the attention alone is replaced."""
    if options.plan is not None:
        return PLAN, read_plan(options.plan).options
    sizes = {} if options.num_landmarks == "auto" else {"num_landmarks": options.num_landmarks}
    return options.attention, {**(options.options or {}), **sizes}
