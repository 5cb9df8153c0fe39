"""The command line: find and run a command, and report errors.

A command is a line of `COMMANDS`: its words, what it does, and the function in `nystrom_lab.cli` that does it. Options
and help come from the signature and docstring of the function that a command calls. A user error ends with one line and
exit code 2, a system error with one line and exit code 1 (`nystrom_lab.cli.faults`); a bug in the program keeps its
traceback.
"""

import difflib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nystrom_lab.cli import data, inspection, models, reproduce, studies, train
from nystrom_lab.cli.faults import expected
from nystrom_lab.cli.streams import plain_warnings, standing_streams

# Options that name files to write.
_OUTPUTS = ("--to", "--figure", "--gather")


class Command(NamedTuple):
    """One command.

    Attributes:
        summary: What it does, in a few words.
        act: Parses the remaining arguments and runs the command.
        lasting: Whether it writes files even if none is named, and so continues when its output is closed.
    """

    summary: str
    act: Callable[[list[str]], None]
    lasting: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0, 1 for a system error, 2 for a user error, 130 for an interruption.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    for name, command in COMMANDS.items():
        if words[: len(name.split())] == name.split():
            lasting = command.lasting or any(word.partition("=")[0] in _OUTPUTS for word in words)
            with standing_streams(lasting=lasting), plain_warnings():
                return _guarded(command.act, name, words[len(name.split()) :])
    with standing_streams(lasting=False):
        return _guarded(_answer, "", words)


def _answer(words: list[str]) -> int:
    """Handle words that are not a command: print the version or the commands, or suggest one."""
    if words == ["--version"]:
        from nystrom import __version__

        print(f"nystrom {__version__}")
        return 0
    asked = " ".join(word for word in words if word not in ("-h", "--help"))
    if not any(name.startswith(asked) for name in COMMANDS):
        raise ValueError(f"there is no command {asked!r}.{_hint(words)} `nystrom --help` lists all.")
    print(_overview(asked))
    # A bare or half command is a question too, but a script should learn that nothing was done.
    return 0 if not words or words[-1] in ("-h", "--help") else 2


def _hint(words: list[str]) -> str:
    """A suggestion: the command closest to these words, or those with the same first word; empty if there is none."""
    family = [name for name in COMMANDS if name.split()[0] == words[0]]
    heads = {name: " ".join(words[: len(name.split())]) for name in family or (*COMMANDS, "--version")}
    likeness = {name: difflib.SequenceMatcher(None, name, head).ratio() for name, head in heads.items()}
    name = max(likeness, key=likeness.__getitem__)
    if likeness[name] >= (0.8 if family else 0.6):
        return f" Perhaps you meant 'nystrom {name}'."
    return f" Commands of {words[0]}: {', '.join(map(repr, family))}." if family else ""


def _guarded(act: Callable[[list[str]], int | None], name: str, words: list[str]) -> int:
    try:
        try:
            code = act(words) or 0
        except SystemExit:
            # Help was printed.
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader, such as head, has seen enough.
        return 0
    except KeyboardInterrupt:
        print("\nnystrom: interrupted.", file=sys.stderr)
        return 130
    except Exception as error:
        if (fault := expected(error, name, words)) is None:
            raise
        print(f"nystrom: {fault.line}", file=sys.stderr)
        return fault.code


def _overview(within: str) -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items() if name.startswith(within)]
    return "\n".join(["usage: nystrom COMMAND ...    (nystrom COMMAND --help lists its options)", "", *lines])


COMMANDS: dict[str, Command] = {
    "train": Command("train a model on a task, such as listops", train.train_model, lasting=True),
    "pretrain": Command(
        "pretrain an encoder on masked words and the order of sentences", train.pretrain_model, lasting=True
    ),
    "finetune": Command(
        "fine-tune an encoder on GLUE, IMDB or labelled texts of your own", train.finetune_model, lasting=True
    ),
    "predict": Command("classify texts with a fine-tuned model", train.predict_texts),
    "evaluate mlm-sop": Command("measure a pretrained model on held-out documents", train.evaluate_pretrained),
    "evaluate": Command("measure a trained model on a task", train.evaluate_model),
    "data prepare listops": Command(
        "generate ListOps expressions, or read the published ones", data.prepare_listops_data
    ),
    "data prepare text": Command(
        "prepare IMDB reviews, or labelled texts of your own, as bytes", data.prepare_text_files
    ),
    "data prepare retrieval": Command(
        "prepare pairs of papers, or of your own texts, as bytes", data.prepare_retrieval_files
    ),
    "data prepare image": Command("prepare CIFAR-10 as grayscale pixels", data.prepare_image_files),
    "data prepare pathfinder": Command(
        "generate Pathfinder images, or read the published ones", data.prepare_pathfinder_data
    ),
    "data prepare mlm-sop": Command(
        "prepare raw texts for pretraining on masked words and sentence order", data.prepare_mlm_sop_texts
    ),
    "data show": Command("show samples of a prepared task", data.show_data),
    "data verify": Command("compare the files of a prepared folder with their checksums", data.verify_data),
    "tokenizer train": Command("train a WordPiece tokenizer on raw texts", data.train_tokenizer_on),
    "lra run": Command(
        "train methods on the tasks of the Long Range Arena, several runs in parallel", train.lra_run, lasting=True
    ),
    "lra status": Command("show the progress of these runs, or of a hyperparameter search", train.lra_status),
    "lra table": Command("accuracies of these runs over seeds, compared with the two papers", train.lra_table),
    "lra curves": Command("accuracies of these runs over training time (Fig. 2 of Skyformer)", train.lra_curves),
    "lra overhead": Command("time of a training step, compared with a bare loop", train.lra_overhead),
    "inspect": Command(
        "measure how close methods are to exact attention in your model, on your texts", inspection.inspect_encoder
    ),
    "convert": Command(
        "make a Nyströmformer from a BERT or RoBERTa, or give a model more positions", models.convert_model
    ),
    "export": Command("export a model to ONNX, for any batch size and length", models.export_model),
    "methods": Command("list the attention methods and their options", studies.list_methods),
    "reproduce": Command(
        "reproduce a table, figure or claim of the papers by name", reproduce.reproduce_study, lasting=True
    ),
    "bench efficiency": Command(
        "time and memory of attention by length (Table 1 of Nyströmformer)",
        studies.bench_efficiency,
        lasting=True,
    ),
    "bench model": Command(
        "time and memory of a whole encoder by length, with exact attention and others",
        studies.bench_model,
        lasting=True,
    ),
    "bench runs": Command(
        "compare methods over several runs, with medians and spread", studies.bench_runs, lasting=True
    ),
    "bench training": Command(
        "time and memory of a training step (Table 2 of Skyformer)", studies.bench_training, lasting=True
    ),
    "report efficiency": Command("table and plot of measured rows", studies.report_study("efficiency")),
    "report model": Command("table and plot of measured rows of whole encoders", studies.report_study("model")),
    "report study": Command("table and plot of the rows of a study of nystrom reproduce", reproduce.report_gathered),
    "report training": Command("table and plot of measured rows of training steps", studies.report_study("training")),
}
