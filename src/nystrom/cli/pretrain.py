"""Commands that pretrain an encoder, and that score it."""

import inspect
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Any

from nystrom.cli.arguments import arguments_of
from nystrom.cli.train import word_after


def pretrain_model(words: list[str]) -> None:
    """Pretrain an encoder."""
    from nystrom.attention.registry import METHODS
    from nystrom.checks import check_names
    from nystrom.train.pretrain.engine import pretrain

    # The method decides which options there are, so its name is read before the rest.
    attention = word_after("--attention", words, _attention_of(word_after("--model", words, "")))
    check_names("attention method", [attention], METHODS)
    method = METHODS[attention].options
    optional: list[tuple[str, Any, Any]] = []
    for option in fields(method):
        kind: Any = option.type
        optional.append((option.name, kind | None, field(default=None)))
    chosen = make_dataclass("Options", optional)
    chosen.__doc__ = method.__doc__
    parameter = inspect.signature(pretrain).parameters["options"]
    arguments = arguments_of(
        pretrain, words, "pretrain", options=parameter.replace(annotation=chosen, default=chosen())
    )
    given = arguments.pop("options")
    arguments["options"] = {key: value for key, value in vars(given).items() if value is not None}
    pretrain(**arguments)


def evaluate_pretrained(words: list[str]) -> None:
    """Score a pretrained model."""
    from nystrom.train.pretrain.engine import evaluate_mlm_sop

    for row in evaluate_mlm_sop(**arguments_of(evaluate_mlm_sop, words, "evaluate mlm-sop")):
        share = row.low is not None and row.high is not None
        value = f"{row.value:.1%} ({row.low:.1%} to {row.high:.1%})" if share else f"{row.value:.4g}"
        print(f"{row.quantity} {value}")


def _attention_of(model: str) -> str:
    """The method of a model of this library that a run starts from; nystrom where there is none."""
    import json

    config = Path(model) / "config.json"
    try:
        named = json.loads(config.read_text(encoding="utf-8")).get("attention", "nystrom")
    except (OSError, ValueError, AttributeError):
        # What is wrong with the model is said when it is read.
        return "nystrom"
    return named if isinstance(named, str) else "nystrom"
