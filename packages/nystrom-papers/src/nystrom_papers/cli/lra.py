"""Tables and curves of the Long Range Arena."""

from pathlib import Path

from nystrom_lab.cli.arguments import call


def lra_table(words: list[str]) -> None:
    """Accuracies of these runs over seeds, compared with the two papers."""
    from nystrom_lab.measure.rows import read_rows
    from nystrom_papers.report.lra.tables import lra_markdown, print_lra
    from nystrom_papers.report.tables import of_device

    def table(
        files: tuple[Path, ...],
        *,
        time: bool = False,
        memory: bool = False,
        device: str | None = None,
        markdown: bool = False,
    ) -> None:
        """Print the accuracies of runs compared with the two papers, or their time and memory.

        Args:
            files: Files of rows of `nystrom lra run` or `nystrom train`.
            time: Print hours of training instead of accuracies, compared with Table 2 of Skyformer.
            memory: Print gigabytes of peak memory instead of accuracies, or next to the hours.
            device: A part of the name of the device whose runs are taken, such as AMD. Default: all runs.
            markdown: Print Markdown.
        """
        if not files:
            raise ValueError("no file of rows is named; expected those of `nystrom lra run`, such as runs/lra/lra.csv.")
        rows = [row for file in files for row in read_rows(file)]
        if device is not None:
            rows = of_device(rows, device)
        if markdown:
            print(lra_markdown(rows, time=time, memory=memory), end="")
        else:
            print_lra(rows, time=time, memory=memory)

    call(table, words, "lra table", positional="files")


def lra_curves(words: list[str]) -> None:
    """Accuracies of these runs over training time (Fig. 2 of Skyformer)."""
    from nystrom.whole_files import check_new
    from nystrom_papers.report.lra.curves import Axis, Shown, draw_lra_curves, gather_curves

    def curves(
        sources: tuple[Path, ...],
        *,
        figure: Path,
        quantity: Shown = "accuracy",
        over: Axis = "seconds",
        gather: Path | None = None,
    ) -> None:
        """Plot the curves of the runs of `nystrom lra run`.

        Args:
            sources: Folder of the runs, a file that --gather wrote, or several of them.
            figure: File for the plot, .png or .svg; an existing file is replaced only if nystrom drew it.
            quantity: "accuracy" or "loss" on the validation split, or "gradient-norm", before clipping.
            over: Horizontal axis: "seconds" of training, or "steps".
            gather: CSV file to write the curves of all runs in the folder to; must not exist yet.
        """
        if not sources:
            raise ValueError("no source is named; expected the folder of `nystrom lra run`, or files of --gather.")
        folder, *others = sources
        if gather is not None and others:
            raise ValueError("--gather takes the curves of one folder: name one source.")
        if gather is not None:
            check_new(gather)
        draw_lra_curves(sources, figure, quantity=quantity, over=over)
        if gather is not None:
            gather_curves(folder, gather)
        print(figure)

    call(curves, words, "lra curves", positional="sources")
