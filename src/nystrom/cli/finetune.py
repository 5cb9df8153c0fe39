"""Commands that fine-tune a model on labelled texts, and that classify other texts with it."""

import inspect
from dataclasses import field, fields, make_dataclass
from typing import Annotated, Any

from nystrom.cli.arguments import arguments_of, positional
from nystrom.cli.train import word_after


def finetune_model(words: list[str]) -> None:
    """Fine-tune a model."""
    import tyro

    from nystrom.attention.registry import METHODS
    from nystrom.checks import check_names
    from nystrom.train.finetune.engine import finetune

    # The method decides which options there are, so its name is read before the rest.
    attention = word_after("--attention", words, "nystrom")
    check_names("attention method", [attention], METHODS)
    method = METHODS[attention].options
    optional: list[tuple[str, Any, Any]] = []
    for option in fields(method):
        kind: Any = option.type
        optional.append((option.name, kind | None, field(default=None)))
    chosen = make_dataclass("Options", optional)
    chosen.__doc__ = method.__doc__
    parameter, grid = (inspect.signature(finetune).parameters[name] for name in ("options", "grid"))
    arguments = arguments_of(
        finetune,
        words,
        "finetune",
        task=positional(finetune, "task"),
        # --num-landmarks rather than --options.num-landmarks.
        options=parameter.replace(annotation=Annotated[chosen, tyro.conf.arg(name="")], default=chosen()),
        # --search.batch-size beside --search.
        grid=grid.replace(annotation=Annotated[grid.annotation, tyro.conf.arg(name="search")]),
    )
    given = arguments.pop("options")
    arguments["options"] = {key: value for key, value in vars(given).items() if value is not None}
    finetune(**arguments)


def predict_texts(words: list[str]) -> None:
    """Classify texts."""
    from nystrom.train.finetune.predict import predict

    predict(**arguments_of(predict, words, "predict"))
