"""The command line: parse, import lazily, call.

A command is a line of `COMMANDS`: its words, what it does, and the function here that does it. Options and help come
from the signature and docstring of the function that a command calls. A mistake of the caller (`ValueError`, and
errors of files) ends with one line and exit code 2.
"""

import difflib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field, fields, make_dataclass
from json import dumps
from pathlib import Path
from typing import Annotated, Any, NamedTuple


class Command(NamedTuple):
    """One command.

    Attributes:
        summary: What it does, in a few words.
        act: Parses the rest of the line and acts.
    """

    summary: str
    act: Callable[[list[str]], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 2 for a mistake of the caller, 130 for an interruption."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        from nystrom import __version__

        print(f"nystrom {__version__}")
        return 0
    for name, command in COMMANDS.items():
        if words[: len(name.split())] == name.split():
            return _guarded(command.act, words[len(name.split()) :])
    asked = " ".join(word for word in words if word not in ("-h", "--help"))
    if any(name.startswith(asked) for name in COMMANDS):
        print(_overview(asked))
        # A bare or half command is a question too, but a script should learn that nothing was done.
        return 0 if not words or words[-1] in ("-h", "--help") else 2
    near = difflib.get_close_matches(asked, COMMANDS, n=1)
    hint = f" Perhaps you meant 'nystrom {near[0]}'." if near else ""
    print(f"{_overview('')}\n\nnystrom: there is no command {asked!r}.{hint}", file=sys.stderr)
    return 2


def _guarded(act: Callable[[list[str]], None], words: list[str]) -> int:
    try:
        act(words)
    except ModuleNotFoundError as error:
        print(f"nystrom: {error}: install what the commands need with pip install 'nystrom[cli]'.", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader, such as head, has seen enough; what is left goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ArithmeticError) as error:
        print(f"nystrom: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nnystrom: interrupted.", file=sys.stderr)
        return 130
    return 0


def _overview(within: str) -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items() if name.startswith(within)]
    return "\n".join(["usage: nystrom COMMAND ...    (nystrom COMMAND --help tells its options)", "", *lines])


def _arguments(
    function: Callable[..., Any], words: list[str], name: str, **replaced: inspect.Parameter
) -> dict[str, Any]:
    """Parse a command line by a function's signature and docstring, without calling the function.

    Args:
        function: Whose arguments are wanted.
        words: What stands behind the command's name.
        name: The command's name.
        **replaced: Parameters that the command line shows in another form.
    """
    import tyro

    parameters = [replaced.get(key, value) for key, value in inspect.signature(function).parameters.items()]
    signature = inspect.Signature(parameters)

    def collect(*values: Any, **named: Any) -> dict[str, Any]:
        return dict(signature.bind(*values, **named).arguments)

    collect.__signature__ = signature  # type: ignore[attr-defined]
    collect.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    collect.__doc__ = function.__doc__
    return tyro.cli(collect, args=words, prog=f"nystrom {name}")


def _prepare_listops(words: list[str]) -> None:
    from nystrom.tasks.lra_listops import prepare_listops

    print(prepare_listops(**_arguments(prepare_listops, words, "data prepare listops")))


def _prepare_text(words: list[str]) -> None:
    from nystrom.tasks.lra_text import prepare_text

    print(prepare_text(**_arguments(prepare_text, words, "data prepare text", source=_from(prepare_text))))


def _prepare_retrieval(words: list[str]) -> None:
    from nystrom.tasks.lra_retrieval import prepare_retrieval as prepare

    print(prepare(**_arguments(prepare, words, "data prepare retrieval", source=_from(prepare))))


def _prepare_image(words: list[str]) -> None:
    from nystrom.tasks.lra_image import prepare_image

    print(prepare_image(**_arguments(prepare_image, words, "data prepare image", source=_from(prepare_image))))


def _prepare_pathfinder(words: list[str]) -> None:
    from nystrom.tasks.lra_pathfinder import prepare_pathfinder as prepare

    print(prepare(**_arguments(prepare, words, "data prepare pathfinder", source=_from(prepare))))


def _show_data(words: list[str]) -> None:
    from nystrom.tasks.show import show

    for shown in show(**_arguments(show, words, "data show", task=_positional(show, "task"))):
        print(shown)


def _from(function: Callable[..., Any]) -> inspect.Parameter:
    """The parameter `source` as the option --from, which no parameter of Python can be called."""
    import tyro

    parameter = inspect.signature(function).parameters["source"]
    return parameter.replace(annotation=Annotated[parameter.annotation, tyro.conf.arg(name="from")])


def _import_listops(words: list[str]) -> None:
    from nystrom.tasks.lra_listops_tsv import import_tsv

    print(import_tsv(**_arguments(import_tsv, words, "data import listops")))


def _train(words: list[str]) -> None:
    from nystrom.attention.registry import METHODS
    from nystrom.shapes import check_names
    from nystrom.train.engine import train

    # The method decides which options there are, so its name is read before the rest.
    parameters = inspect.signature(train).parameters
    attention = _word_after("--attention", words, parameters["attention"].default)
    check_names("attention method", [attention], METHODS)
    method = METHODS[attention].options
    optional: list[tuple[str, Any, Any]] = []
    for option in fields(method):
        kind: Any = option.type
        optional.append((option.name, kind | None, field(default=None)))
    chosen = make_dataclass("Options", optional)
    chosen.__doc__ = method.__doc__
    arguments = _arguments(
        train,
        words,
        "train",
        task=_positional(train, "task"),
        options=parameters["options"].replace(annotation=chosen, default=chosen()),
    )
    given = arguments.pop("options")
    arguments["options"] = {key: value for key, value in vars(given).items() if value is not None}
    train(**arguments)


def _evaluate(words: list[str]) -> None:
    from nystrom.train.engine import evaluate

    row = evaluate(**_arguments(evaluate, words, "evaluate", task=_positional(evaluate, "task")))
    spread = "" if row.low is None or row.high is None else f" ({row.low:.1%} to {row.high:.1%})"
    print(f"{row.quantity} {row.value:.1%}{spread}")


def _word_after(flag: str, words: list[str], default: str) -> str:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == flag and following:
            return following
        if word.startswith(f"{flag}="):
            return word.removeprefix(f"{flag}=")
    return default


def _lra_run(words: list[str]) -> None:
    from nystrom.train.lra import run_grid

    arguments = _arguments(run_grid, words, "lra run")
    if failures := run_grid(**arguments):
        for failure in failures:
            print(f"nystrom: {failure.name} failed, {failure.reason}\n         log: {failure.log}", file=sys.stderr)
        raise SystemExit(1)
    print(f"nystrom lra table {arguments['to'] / 'lra.csv'} tells the accuracies.")


def _lra_table(words: list[str]) -> None:
    from nystrom.records import read_rows
    from nystrom.report.lra_tables import lra_markdown, print_lra

    def table(files: tuple[Path, ...], *, markdown: bool = False) -> None:
        """Print the accuracies of runs beside those of the two papers.

        Args:
            files: Rows of `nystrom lra run` or `nystrom train`.
            markdown: As Markdown.
        """
        rows = [row for file in files for row in read_rows(file)]
        if markdown:
            print(lra_markdown(rows), end="")
        else:
            print_lra(rows)

    table(**_arguments(table, words, "lra table", files=_positional(table, "files")))


def _lra_curves(words: list[str]) -> None:
    from nystrom.report.lra_curves import draw_lra_curves

    def curves(folder: Path, *, png: Path) -> None:
        """Draw the validation accuracy of the runs of `nystrom lra run` over the time of training.

        Args:
            folder: Folder of the runs.
            png: Where to.
        """
        draw_lra_curves(folder, png)
        print(png)

    curves(**_arguments(curves, words, "lra curves", folder=_positional(curves, "folder")))


def _lra_overhead(words: list[str]) -> None:
    from nystrom.train.overhead import run_overhead

    for row in run_overhead(**_arguments(run_overhead, words, "lra overhead")):
        print(f"{row.quantity:40} {row.value:9.3f} {row.unit:2} ({row.low:.3f} to {row.high:.3f})")


def _efficiency(words: list[str]) -> None:
    from nystrom.bench.efficiency import run_efficiency
    from nystrom.report import show_study

    arguments = _arguments(run_efficiency, words, "bench efficiency")
    rows = run_efficiency(**arguments)
    show_study(rows, Path(arguments["to"]))


def _training(words: list[str]) -> None:
    from nystrom.bench.training import run_training
    from nystrom.report import show_study

    arguments = _arguments(run_training, words, "bench training")
    rows = run_training(**arguments)
    show_study(rows, Path(arguments["to"]))


def _report_study(study: str) -> Callable[[list[str]], None]:
    def act(words: list[str]) -> None:
        from nystrom.records import read_rows
        from nystrom.report.paper import paper_markdown
        from nystrom.report.plots import draw_study
        from nystrom.report.tables import print_study, study_markdown

        def report(file: Path, *, markdown: bool = False, paper: bool = False, png: Path | None = None) -> None:
            """Print the table of measured rows again, and draw them.

            Args:
                file: Rows that `nystrom bench` wrote.
                markdown: Print the table as Markdown.
                paper: Print ratios beside those that the paper printed, as Markdown.
                png: Where to draw the plot; none is drawn if not given.
            """
            rows = read_rows(file)
            if rows and rows[0].study != study:
                raise ValueError(
                    f"{file} holds rows of the study {rows[0].study!r}; expected {study!r}: "
                    f"try nystrom report {rows[0].study}."
                )
            if paper:
                print(paper_markdown(rows))
            elif markdown:
                print(study_markdown(rows))
            else:
                print_study(rows)
            if png is not None:
                draw_study(rows, png)

        report(**_arguments(report, words, f"report {study}", file=_positional(report, "file")))

    return act


def _positional(function: Callable[..., Any], name: str) -> inspect.Parameter:
    """The parameter as one that stands on the command line without a flag."""
    import tyro

    parameter = inspect.signature(function).parameters[name]
    return parameter.replace(annotation=tyro.conf.Positional[parameter.annotation])


def _convert(words: list[str]) -> None:
    from nystrom.encoder.convert import convert

    print(convert(**_arguments(convert, words, "convert", source=_positional(convert, "source"))))


def _export(words: list[str]) -> None:
    from nystrom.encoder.export import export

    print(export(**_arguments(export, words, "export", folder=_positional(export, "folder"))))


def _methods(words: list[str]) -> None:
    from nystrom.attention.registry import METHODS
    from nystrom.report.methods import MethodLine, methods_markdown, print_methods

    def methods(markdown: bool = False) -> None:
        """Print the attention methods: what each is, its time, its exact limit, its source and its options.

        Args:
            markdown: As a Markdown table, without the options.
        """
        lines = []
        for name, method in METHODS.items():
            options = ", ".join(f"{option.name}={option.default!r}" for option in fields(method.options))
            lines.append(
                MethodLine(name, method.summary, method.cost, method.exact_limit, method.source, options or "none")
            )
        if markdown:
            print(methods_markdown(lines))
        else:
            print_methods(lines)

    methods(**_arguments(methods, words, "methods"))


def _fill_mask(words: list[str]) -> None:
    from dataclasses import asdict

    from nystrom.encoder.fill_mask import Device

    def fill_mask(
        text: str | None = None,
        *,
        model: str,
        file: Path | None = None,
        top_k: int = 5,
        json: bool = False,
        batch_size: int = 16,
        device: Device = "auto",
    ) -> None:
        """Fill in the [MASK] of a text, or of each line of a file.

        Args:
            text: The text; may hold several masks.
            model: Folder of a masked language model with its tokenizer, in this library's format or the published one.
            file: A file with one text per line in place of `text`; - reads standard input.
            top_k: Words per mask.
            json: Print one JSON object per word rather than tables.
            batch_size: Lines at a time; changes nothing but speed and memory.
            device: Where to run.
        """

    given = _arguments(fill_mask, words, "fill-mask", text=_positional(fill_mask, "text"))
    text, file, as_json = given.pop("text", None), given.pop("file", None), given.pop("json", False)
    if (text is None) == (file is None):
        raise ValueError(
            "fill-mask takes either a text or --file: name a text, a file of texts, or --file - for stdin."
        )
    if file is not None and str(file) != "-" and not file.is_file():
        raise ValueError(f"file is {file}, which is no file; - reads standard input.")

    from transformers.utils import logging

    from nystrom.encoder.fill_mask import MaskFiller
    from nystrom.report.fillings import print_fillings

    logging.disable_progress_bar()
    filler = MaskFiller(given.pop("model"), **given)
    with _lines(text, file, filler.check) as lines:
        fillings = (asdict(filling) for filling in filler.fill(lines))
        if not as_json:
            print_fillings(fillings)
            return
        for filling in fillings:
            print(dumps(filling, ensure_ascii=False))


@contextmanager
def _lines(text: str | None, file: Path | None, check: Callable[[Iterable[str]], int]) -> Iterator[Iterable[str]]:
    """Lines from where they are, with a bar on stderr for those of a file; a file is looked through first."""
    from tqdm import tqdm

    if text is not None:
        yield [text]
    elif file is None or str(file) == "-":
        yield tqdm(sys.stdin, unit=" lines", disable=sys.stdout.isatty() or None)
    else:
        with file.open(encoding="utf-8") as opened:
            try:
                total = check(opened)
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is no UTF-8 text ({error}).") from error
            opened.seek(0)
            yield tqdm(opened, unit=" lines", total=total, disable=sys.stdout.isatty() or None)


COMMANDS: dict[str, Command] = {
    "train": Command("train a model on a task, such as listops", _train),
    "evaluate": Command("measure a trained model on a task", _evaluate),
    "data prepare listops": Command("generate the ListOps data of the Long Range Arena", _prepare_listops),
    "data prepare text": Command("prepare IMDB reviews, or labelled texts of your own, as bytes", _prepare_text),
    "data prepare retrieval": Command("prepare pairs of papers, or of your own texts, as bytes", _prepare_retrieval),
    "data prepare image": Command("prepare CIFAR-10 as gray pixels", _prepare_image),
    "data prepare pathfinder": Command("draw Pathfinder's pictures, or read the published ones", _prepare_pathfinder),
    "data show": Command("look at samples of a prepared task", _show_data),
    "data import listops": Command("read ListOps from the official tsv files", _import_listops),
    "lra run": Command("train methods on the tasks of the Long Range Arena, several runs at a time", _lra_run),
    "lra table": Command("their accuracies over seeds, beside those of the two papers", _lra_table),
    "lra curves": Command("their accuracies over the time of training (Fig. 2 of Skyformer)", _lra_curves),
    "lra overhead": Command("time of a training step beside one of a bare loop", _lra_overhead),
    "fill-mask": Command("fill in the [MASK] of a text with a masked language model", _fill_mask),
    "convert": Command("make a Nyströmformer of a BERT or RoBERTa, or give a model more positions", _convert),
    "export": Command("write a model as ONNX, for any batch and length", _export),
    "methods": Command("list the attention methods and their options", _methods),
    "bench efficiency": Command("time and memory of attention over the length (Table 1 of Nyströmformer)", _efficiency),
    "bench training": Command("time and memory of a training step (Table 2 of Skyformer)", _training),
    "report efficiency": Command("table and plot of rows that were measured before", _report_study("efficiency")),
    "report training": Command("the same for rows of training steps", _report_study("training")),
}
