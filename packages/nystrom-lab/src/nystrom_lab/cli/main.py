"""The command line: find and run a command, and report errors.

A command is a line of `COMMANDS`: its words, and the function that parses the rest, in a module of `nystrom_lab.cli`
that is imported when it is needed; other distributions add theirs as entry points of the group `nystrom.commands`. The
first line of its docstring says what it does. Options and help come from the signature and docstring of the function
that it calls. A user error ends with one line and exit code 2, a system error
with one line and exit code 1 (`nystrom_lab.cli.faults`); a bug in the program keeps its traceback.
"""

import difflib
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pkgutil import resolve_name

from nystrom_lab.cli.arguments import OUTPUTS
from nystrom_lab.cli.streams import plain_warnings, standing_streams


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0, 1 for a system error, 2 for a user error, 130 for an interruption.
    """
    outputs = [f"--{name}" for name in OUTPUTS]
    words = list(sys.argv[1:] if arguments is None else arguments)
    if sys.flags.optimize > 1 and (not words or {"-h", "--help"} & {*words}):
        print(
            "nystrom: -OO (PYTHONOPTIMIZE=2) strips the texts of this help: start Python without it.", file=sys.stderr
        )
    for name in COMMANDS:
        if words[: len(name.split())] == name.split():
            lasting = name in LASTING or any(word.partition("=")[0] in outputs for word in words)
            with standing_streams(lasting=lasting), plain_warnings():
                return _guarded(_function(name), name, words[len(name.split()) :])
    with standing_streams(lasting=False):
        return _guarded(_answer, "", words)


def _function(name: str) -> Callable[[list[str]], int | None]:
    return resolve_name(COMMANDS[name])


def _answer(words: list[str]) -> int:
    """Handle words that are not a command: print the version or the commands, or suggest one."""
    if words == ["--version"]:
        from nystrom import __version__

        print(f"nystrom {__version__}")
        return 0
    question = " ".join(word for word in words if word not in ("-h", "--help"))
    starts = GROUPS[question][1] if question in GROUPS else question
    if not any(name.startswith(starts) for name in COMMANDS):
        if (question in GROUPS or question.startswith(PAPERS)) and not any(
            name.startswith(PAPERS) for name in COMMANDS
        ):
            raise ValueError(f"{question!r} needs nystrom-papers: pip install nystrom-papers.")
        raise ValueError(f"there is no command {question!r}.{_hint(words)} See nystrom --help.")
    print(_overview(question))
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
        from nystrom_lab.cli.faults import expected

        if (fault := expected(error, name, words)) is None:
            raise
        print(f"nystrom: {fault.line}", file=sys.stderr)
        return fault.code


def _overview(within: str) -> str:
    """The commands that are used most, those of a group, or those that begin with some words."""
    if not within:
        lines = ["usage: nystrom COMMAND ...    (nystrom COMMAND --help lists its options)"]
        for group, (title, starts) in GROUPS.items():
            if names := [name for name in FIRST if name.startswith(starts) and name in COMMANDS]:
                lines += ["", f"{title}  (all: nystrom {group} --help)", *_lines(names)]
        return "\n".join(lines)
    starts = GROUPS[within][1] if within in GROUPS else within
    return "\n".join(
        ["usage: nystrom COMMAND ...", "", *_lines([name for name in COMMANDS if name.startswith(starts)])]
    )


def _lines(names: Sequence[str]) -> list[str]:
    width = max(map(len, names))
    docs = {name: (_function(name).__doc__ or "").partition("\n")[0].rstrip(".") for name in names}
    return [f"  {name:{width}}  {doc}" for name, doc in docs.items()]


_OWN = {
    "train": "train:train_model",
    "pretrain": "train:pretrain_model",
    "finetune": "train:finetune_model",
    "predict": "train:predict_texts",
    "evaluate mlm-sop": "train:evaluate_pretrained",
    "evaluate": "train:evaluate_model",
    "data prepare listops": "data:listops",
    "data prepare text": "data:text",
    "data prepare retrieval": "data:retrieval",
    "data prepare image": "data:image",
    "data prepare pathfinder": "data:pathfinder",
    "data prepare mlm-sop": "data:mlm_sop",
    "data show": "data:show_data",
    "data verify": "data:verify_data",
    "tokenizer train": "data:train_tokenizer_on",
    "lra run": "train:lra_run",
    "lra status": "train:lra_status",
    "inspect": "inspection:inspect_encoder",
    "convert": "models:convert_model",
    "heal": "models:heal_model",
    "export": "models:export_model",
    "methods": "models:list_methods",
}
COMMANDS = {name: f"nystrom_lab.cli.{place}" for name, place in _OWN.items()} | {
    each.name: each.value for each in entry_points(group="nystrom.commands") if each.name not in _OWN
}
# The title of a group, and how the names of its commands begin; each command is in one group.
GROUPS = {
    "models": ("Use a model", ("convert", "heal", "inspect", "predict", "export", "methods")),
    "training": ("Train", ("pretrain", "finetune", "train", "evaluate", "data", "tokenizer")),
    "papers": ("The papers", ("reproduce", "lra")),
    "measuring": ("Measure", ("bench", "report")),
}
# Commands of the first screen, in its order.
FIRST = (
    *("convert", "inspect", "predict", "export"),
    *("finetune", "pretrain", "train"),
    *("reproduce", "lra run"),
    "bench efficiency",
)
# How the commands of nystrom-papers begin.
PAPERS = ("reproduce", "lra table", "lra curves", "bench", "report")
# Commands that write files even if none is named, and so continue when their output is closed.
LASTING = {"train", "pretrain", "finetune", "lra run", "reproduce", "bench efficiency", "bench model", "bench training"}
