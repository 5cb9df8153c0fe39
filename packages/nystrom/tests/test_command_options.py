"""A class of options gives a function its arguments, their documentation and their types."""

import inspect
from dataclasses import KW_ONLY, dataclass

import pytest

from nystrom.command_options import taking


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What two commands share.

    Attributes:
        seed: Of what is drawn.
        steps: Steps,
            or none.
    """

    seed: int = 0
    steps: int | None = None


@dataclass(frozen=True)
class Asked(Shared):
    """Options of a command.

    Attributes:
        name: Whom to greet.
        loud: Whether to shout.
        seed: Another word for it.
    """

    name: str
    _: KW_ONLY
    loud: bool = False

    def __post_init__(self):
        if not self.name:
            raise ValueError("name is empty.")


@taking(Asked)
def greet(asked):
    """Greet somebody.

    Once, or more often.

    Returns:
        All that was asked.

    Raises:
        ValueError: No name.
    """
    return asked


def test_callers_see_the_fields_the_commands_own_first():
    assert str(inspect.signature(greet)) == (
        "(name: str, *, loud: bool = False, seed: int = 0, steps: int | None = None)"
    )
    assert greet("you", steps=3) == greet(name="you", steps=3) == Asked("you", steps=3)
    with pytest.raises(ValueError, match="name is empty"):
        greet("")
    with pytest.raises(TypeError, match="step"):
        greet("you", step=3)


def test_the_documentation_of_the_fields_stands_before_what_is_returned():
    assert (
        greet.__doc__
        == """Greet somebody.

Once, or more often.

Args:
    name: Whom to greet.
    loud: Whether to shout.
    seed: Another word for it.
    steps: Steps,
        or none.

Returns:
    All that was asked.

Raises:
    ValueError: No name."""
    )
