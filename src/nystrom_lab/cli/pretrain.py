"""Commands that pretrain an encoder, and that score it."""

from nystrom_lab.cli.arguments import arguments_of
from nystrom_lab.cli.method_options import arguments_with_method, attention_of, word_after
from nystrom_lab.cli.train import pretrain_on_task


def pretrain_model(words: list[str]) -> None:
    """Pretrain an encoder: on the inputs of the task that the first word names, or else on prepared texts."""
    if words and not words[0].startswith("-"):
        pretrain_on_task(words)
        return
    from nystrom_lab.training.pretrain.pretrain import pretrain

    default = attention_of(word_after("--model", words, ""))
    pretrain(**arguments_with_method(pretrain, words, "pretrain", default=default))


def evaluate_pretrained(words: list[str]) -> None:
    """Score a pretrained model."""
    from nystrom_lab.training.pretrain.pretrain import evaluate_mlm_sop

    for row in evaluate_mlm_sop(**arguments_of(evaluate_mlm_sop, words, "evaluate mlm-sop")):
        share = row.low is not None and row.high is not None
        value = f"{row.value:.1%} ({row.low:.1%} to {row.high:.1%})" if share else f"{row.value:.4g}"
        print(f"{row.quantity} {value}")
