"""Commands that pretrain an encoder, and that score it."""

from pathlib import Path

from nystrom.cli.arguments import arguments_of
from nystrom.cli.method_options import arguments_with_method, word_after


def pretrain_model(words: list[str]) -> None:
    """Pretrain an encoder."""
    from nystrom.train.pretrain.engine import pretrain

    default = _attention_of(word_after("--model", words, ""))
    pretrain(**arguments_with_method(pretrain, words, "pretrain", default=default))


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
