"""Commands that train, pretrain, fine-tune and evaluate models, singly or in a grid."""

import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from nystrom_lab.cli.arguments import arguments_of, arguments_with_method, attention_of, call, optional, word_after
from nystrom_lab.config import (
    Arena,
    EvaluateOptions,
    EvaluatePretrainedOptions,
    FinetuneOptions,
    PredictOptions,
    PretrainOptions,
    TrainOptions,
)

if TYPE_CHECKING:
    from nystrom_lab.training.presets import MethodSetting


def train_model(words: list[str]) -> None:
    """Train a model on a task, such as listops."""
    options = _options(words, "train", without=["mask_share"])
    from nystrom_lab.training.train import train

    train(options)


def pretrain_model(words: list[str]) -> None:
    """Pretrain an encoder on masked words and the order of sentences."""
    if words and not words[0].startswith("-"):
        _pretrain_on_task(words)
        return
    model = word_after("--model", words, "")
    default = attention_of(model)
    preset = {} if model else _pretraining_of(words, word_after("--attention", words, default))
    arguments = arguments_with_method(PretrainOptions, words, "pretrain", default=default, preset=preset)
    options = PretrainOptions(**arguments)
    from nystrom_lab.training.pretrain.pretrain_settings import find_pretraining

    find_pretraining(options.preset)
    from nystrom_lab.training.pretrain.pretrain import pretrain

    pretrain(options)


def _pretrain_on_task(words: list[str]) -> None:
    """Train an encoder on masked tokens of the inputs of the task that the first word names."""
    from nystrom.checks import check_names
    from nystrom_lab.data.lra.facts import LRA

    check_names("task", words[:1], LRA)
    options = _options(words, "pretrain", defaults={"mask_share": LRA[words[0]].mask_share})
    if not options.mask_share:
        raise ValueError("mask_share is 0; expected a number in (0, 1), the share of the tokens that are masked.")
    from nystrom_lab.training.train import train

    train(options)


def _options(words: list[str], name: str, **how: Any) -> TrainOptions:
    import tyro

    from nystrom.attention.method_names import NO_ATTENTION
    from nystrom_lab.training.run_settings import train_options

    model = word_after("--model", words, "")
    default = attention_of(model)
    preset, note = ({}, "") if model else _preset_of(words, word_after("--attention", words, default))
    # A flag of its own would not say which value a preset has.
    types = {each.name: tyro.conf.FlagConversionOff[bool] for each in fields(Arena) if each.type is bool}
    if not preset:
        # The model decides, or the preset is refused.
        preset = dict.fromkeys(["attention", "preset", *(each.name for each in fields(Arena))])
        types = {each: type_ | None for each, type_ in get_type_hints(TrainOptions).items() if each in preset}
    how |= {"default": default, "also": [NO_ATTENTION], "positional": "task", "preset": preset, "note": note}
    return train_options(**arguments_with_method(TrainOptions, words, name, types=types, **how))


def _pretraining_of(words: list[str], attention: str) -> dict[str, Any]:
    """The options that a pretraining takes from its preset, in the form of `_preset_of`."""
    from nystrom_lab.training.presets import MethodSetting
    from nystrom_lab.training.pretrain.pretrain_settings import PRETRAINING, SIZES, loop_values

    if (base := PRETRAINING.get(word_after("--preset", words, PretrainOptions.preset))) is None or base.lengthens:
        # The preset is refused later, or the model that it needs decides.
        return {}
    values = loop_values(base, *_steps_of(words, base.steps))
    values |= {name: getattr(base, name) for name in ("length", *SIZES)}
    return values | _of_method(base.methods(base.length).get(attention, MethodSetting()), attention)


def _steps_of(words: list[str], whole: int) -> tuple[int, int, int | None]:
    """The steps that a command line names, those of the preset, and the interval of evaluation that it names."""
    steps, every = (word_after(flag, words, "") for flag in ("--steps", "--evaluate-every"))
    named = int(steps) if steps.isdecimal() and int(steps) else whole
    return named, whole, int(every) if every.isdecimal() and int(every) else None


def _of_method(method: "MethodSetting", attention: str) -> dict[str, Any]:
    """The options that a run takes from the preset of its method, as "options.NAME"."""
    from nystrom.attention.registry import METHODS

    options = fields(METHODS[attention].options) if attention in METHODS else ()
    defaults = {each.name: each.default for each in options if each.default not in (MISSING, None)}
    values = {f"options.{key}": value for key, value in (defaults | dict(method.options)).items()}
    return values | {"attention": attention, "conv_kernel_size": method.conv_kernel_size or 0}


def _preset_of(words: list[str], attention: str) -> tuple[dict[str, Any], str]:
    """The arguments that a command line takes from its preset, options as "options.NAME"; and a line that says so.

    An unknown preset has nothing here: the training refuses it.
    """
    from nystrom_lab.data.lra.facts import LRA
    from nystrom_lab.training.presets import PRESETS, MethodSetting
    from nystrom_lab.training.run_settings import preset_values

    task, name = words[0] if words and words[0] in LRA else "listops", word_after("--preset", words, "nystromformer")
    if (base := PRESETS.get((task, name))) is None:
        return {}, ""
    method = base.methods(base.data.max_length).get(attention, MethodSetting())
    steps, _, every = _steps_of(words, base.steps)
    values = preset_values(base, method, word_after("--positions", words, "") or None, steps, every)
    values |= {"preset": name} | _of_method(method, attention)
    values |= {} if LRA[task].pad_token_id is None else {"max_length": base.data.max_length}
    return values, f"Defaults are those of {task} with the preset {name}; name a task and --preset to see its own."


def finetune_model(words: list[str]) -> None:
    """Fine-tune an encoder on GLUE, IMDB or labelled texts of your own."""
    # --num-landmarks rather than --options.num-landmarks, and --search.batch-size beside --search.
    arguments = arguments_with_method(
        FinetuneOptions, words, "finetune", default="nystrom", flat=True, positional="task", names={"grid": "search"}
    )
    options = FinetuneOptions(**arguments)
    from nystrom_lab.training.finetune.finetune import finetune

    finetune(options)


def predict_texts(words: list[str]) -> None:
    """Classify texts with a fine-tuned model."""
    options = call(PredictOptions, words, "predict")
    from nystrom_lab.training.finetune.predict import predict

    predict(options)


def evaluate_model(words: list[str]) -> None:
    """Measure a trained model on a task."""
    from nystrom.checks import check_names
    from nystrom_lab.data.lra.facts import LRA

    options = call(EvaluateOptions, words, "evaluate", positional="task")
    check_names("task", [options.task], LRA)
    from nystrom_lab.training.scoring import evaluate

    row = evaluate(options)
    spread = "" if row.low is None or row.high is None else f" ({row.low:.1%} to {row.high:.1%})"
    print(f"{row.quantity} {row.value:.1%}{spread}")


def evaluate_pretrained(words: list[str]) -> None:
    """Measure a pretrained model on held-out documents."""
    options = call(EvaluatePretrainedOptions, words, "evaluate mlm-sop")
    from nystrom_lab.training.pretrain.pretrain import evaluate_mlm_sop

    for row in evaluate_mlm_sop(options):
        share = row.low is not None and row.high is not None
        value = f"{row.value:.1%} ({row.low:.1%} to {row.high:.1%})" if share else f"{row.value:.4g}"
        print(f"{row.quantity} {value}{row.note and f' ({row.note})'}")


def lra_run(words: list[str]) -> None:
    """Train methods on the tasks of the Long Range Arena, several runs in parallel."""
    import tyro

    from nystrom_lab.training.grid.run_grid import GridOptions, run_grid

    changes = optional(Arena)
    group = Annotated[changes, tyro.conf.arg(name="")]
    arguments = arguments_of(GridOptions, words, "lra run", types={"changes": group}, defaults={"changes": changes()})
    arguments["changes"] = {key: each for key, each in vars(arguments["changes"]).items() if each is not None}
    options = GridOptions(**arguments)
    if failures := run_grid(options):
        for failure in failures:
            print(f"nystrom: {failure.name} failed, {failure.reason}\n         log: {failure.log}", file=sys.stderr)
        raise SystemExit(1)
    print(f"nystrom lra table {options.to / 'lra.csv'} prints the accuracies.")


def lra_status(words: list[str]) -> None:
    """Show the progress of these runs, or of a hyperparameter search."""
    from nystrom_lab.training.grid.run_grid import status_lines

    def status(folder: Path) -> None:
        """Print the progress and job of each run of `nystrom lra run`, or trial of `nystrom finetune --search`.

        Args:
            folder: Folder of the runs.
        """
        print("\n".join(status_lines(folder)))

    call(status, words, "lra status", positional="folder")
