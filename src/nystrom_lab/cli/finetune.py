"""Commands that fine-tune a model on labelled texts, and that classify other texts with it."""

import inspect
from typing import Annotated

from nystrom_lab.cli.arguments import arguments_of, positional
from nystrom_lab.cli.method_options import arguments_with_method


def finetune_model(words: list[str]) -> None:
    """Fine-tune a model."""
    import tyro

    from nystrom_lab.training.finetune.finetune import finetune

    grid = inspect.signature(finetune).parameters["grid"]
    arguments = arguments_with_method(
        finetune,
        words,
        "finetune",
        default="nystrom",
        # --num-landmarks rather than --options.num-landmarks.
        flat=True,
        task=positional(finetune, "task"),
        # --search.batch-size beside --search.
        grid=grid.replace(annotation=Annotated[grid.annotation, tyro.conf.arg(name="search")]),
    )
    finetune(**arguments)


def predict_texts(words: list[str]) -> None:
    """Classify texts."""
    from nystrom_lab.training.finetune.predict import predict

    predict(**arguments_of(predict, words, "predict"))
