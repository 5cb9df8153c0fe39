"""Commands that measure time and memory, and print what was measured."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from nystrom_lab.cli.arguments import call


def _bench(study: str, says: str) -> Callable[[list[str]], None]:
    """The command that measures a study of `nystrom_papers.bench`, prints its rows and plots them."""

    def act(words: list[str]) -> None:
        from nystrom_papers.report import check_place, show_study

        module = import_module(f"nystrom_papers.bench.{study}")
        options = call(getattr(module, f"{study.title()}Options"), words, f"bench {study}")
        check_place(study, options.to)
        show_study(getattr(module, f"run_{study}")(options), options.to)

    act.__doc__ = says
    return act


bench_efficiency = _bench("efficiency", "Time and memory of attention by length (Table 1 of Nyströmformer).")
bench_model = _bench("model", "Time and memory of a whole encoder by length, with exact attention and others.")
bench_training = _bench("training", "Time and memory of a training step (Table 2 of Skyformer).")


def _report_study(study: str, of: str) -> Callable[[list[str]], None]:
    """The command that prints and plots the rows of a study, `of` what they are."""

    def act(words: list[str]) -> None:
        from nystrom_lab.measure.rows import read_rows
        from nystrom_lab.report.plots.canvas import check_figure
        from nystrom_papers.report.plots.speed import draw_study
        from nystrom_papers.report.printed_ratios import paper_markdown
        from nystrom_papers.report.tables import of_device, only_methods, only_quantities, print_study, study_markdown

        def report(
            file: Path,
            *,
            markdown: bool = False,
            only: tuple[str, ...] = (),
            methods: tuple[str, ...] = (),
            device: str | None = None,
            paper: bool = False,
            figure: Path | None = None,
        ) -> None:
            """Print the table of measured rows, and plot them.

            Args:
                file: File of rows, written by `nystrom bench`.
                markdown: Print the table as Markdown.
                only: Quantities to print and draw, such as "forward time". Default: all.
                methods: Methods to print and draw, as the table calls them. Default: all.
                device: A part of the name of the device whose rows are taken, such as AMD. Default: all rows.
                paper: Print ratios next to those printed in the paper, as Markdown.
                figure: File for the plot, .png or .svg; an existing file is replaced only if nystrom drew it. Default:
                    no plot.
            """
            if figure is not None:
                check_figure(figure)
            rows = read_rows(file)
            if rows and rows[0].study != study:
                raise ValueError(
                    f"{file} holds rows of the study {rows[0].study!r}; expected {study!r}"
                    f"{_way_out(file, rows[0].study)}."
                )
            if device is not None:
                rows = of_device(rows, device)
            if only:
                rows = only_quantities(rows, only)
            if methods:
                rows = only_methods(rows, methods)
            if paper:
                print(paper_markdown(rows), end="")
            elif markdown:
                print(study_markdown(rows), end="")
            else:
                print_study(rows)
            if figure is not None:
                draw_study(rows, figure)

        call(report, words, f"report {study}", positional="file")

    act.__doc__ = f"Table and plot of measured rows of {of}."
    return act


report_efficiency = _report_study("efficiency", "attention")
report_model = _report_study("model", "whole encoders")
report_training = _report_study("training", "training steps")


def _way_out(file: Path, study: str) -> str:
    """The command that prints rows of this study, after a colon; empty if there is none."""
    from nystrom_papers.studies.reproduce.catalogue import CATALOGUE

    if study in ("efficiency", "model", "training"):
        return f": try nystrom report {study} {file}"
    return f": try nystrom report study {file} --study {study}" if study in CATALOGUE else ""
