"""Commands that measure the engines of a CPU, and print what was measured."""

from pathlib import Path

from nystrom_lab.cli.arguments import call


def bench_engines(words: list[str]) -> None:
    """Time, memory and error of an encoder in each engine of a CPU, by length."""
    from nystrom_papers.bench.engines import EnginesOptions, run_engines
    from nystrom_papers.report.engines import print_engines

    print_engines(run_engines(call(EnginesOptions, words, "bench engines", positional="folder")))


def report_engines(words: list[str]) -> None:
    """Table of measured rows of the engines of a CPU."""
    from nystrom_lab.measure.rows import read_rows
    from nystrom_papers.report.engines import print_engines

    def report(file: Path, *, markdown: bool = False) -> None:
        """Print the table of measured rows.

        Args:
            file: File of rows, written by `nystrom bench engines`.
            markdown: Print the table as Markdown.
        """
        print_engines(read_rows(file), markdown=markdown)

    call(report, words, "report engines", positional="file")
