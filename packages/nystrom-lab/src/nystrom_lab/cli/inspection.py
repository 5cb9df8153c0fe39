"""The command that measures how close methods are to exact attention in a user's model, on the user's texts."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from nystrom.checks import check_at_least, check_positive
from nystrom.whole_files import check_new, write_whole
from nystrom_lab.cli.arguments import call

# Methods compared if the user names none; a plan may choose exact attention, too.
USUAL = ("nystrom-64", "nystrom-128", "nystrom-256", "near_far", "near_far-128")


def inspect_encoder(words: list[str]) -> None:
    """Measure how close methods are to exact attention in your model, on your texts."""
    inspect(call(InspectOptions, words, "inspect", positional="model"))


@dataclass(frozen=True)
class InspectOptions:
    """Measure how close methods are to exact attention in a model: by layer, by head, and for the whole model.

    Attributes:
        model: Folder of an encoder (of transformers or of this library) with its tokenizer.
        texts: Text files like those that the model will read; may be compressed.
        methods: Methods with their sizes, such as nystrom-64 performer-256. Default: Nyström attention with 64, 128 and
            256 landmarks, and near_far in two sizes.
        length: Tokens per text. Default: the model's positions, but at most 512.
        num_texts: Number of texts, spread evenly over the files.
        num_queries: Queries sampled per text and layer; more give narrower intervals.
        whole_model: Also compare hidden states and predictions of the whole model; the only part that takes more than
            linear time.
        budget: Largest relative error of the hidden states, such as .05: chooses the cheapest method for each layer
            among those given (default: the usual ones and exact attention, softmax), and heads that attend exactly
            beside it, by the texts except the last quarter, on which the plan is measured, too; writes plan.json.
        num_exact_heads: The most exact heads that a plan may have in layers with another method; 0 for none.
        seed: Seed of the sample.
        threads: CPU threads. Default: torch's choice.
        device: Device; "auto" uses a GPU if there is one.
        to: Folder for rows.csv, verdict.txt, the figures and plan.json. Without it nothing is written.
    """

    model: Path
    _: KW_ONLY
    texts: tuple[Path, ...]
    methods: tuple[str, ...] = ()
    length: int | None = None
    num_texts: int = 4
    num_queries: int = 128
    whole_model: bool = True
    budget: float | None = None
    num_exact_heads: int = 4
    seed: int = 0
    threads: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    to: Path | None = None


def inspect(options: InspectOptions) -> None:
    """Measure and print what `InspectOptions` ask for, and write it to the folder, if one is named.

    Raises:
        ValueError: A model that no method supports, texts that are too short, an unknown method, a folder that already
            holds such files, or a budget that no method meets, that lacks a folder for the plan, or whose plan could
            not name the model's layers.
    """
    model, budget, to = options.model, options.budget, options.to
    from nystrom_lab.report.plots.canvas import FORMATS, house_style, save_figure
    from nystrom_lab.report.plots.inspection import FIGURES, inspection_figures

    if budget is not None:
        check_positive("budget", budget)
        if to is None:
            raise ValueError(f"budget is {budget:g}, and its plan is written to a folder: name one with --to.")
    if to is not None:
        figures = (f"{each}{suffix}" for each in FIGURES for suffix in FORMATS)
        for name in ("rows.csv", "verdict.txt", "plan.json", *figures):
            check_new(to / name)
    check_at_least("num_exact_heads", options.num_exact_heads, 0)
    names = options.methods or USUAL
    from nystrom.attention.method_names import read_method

    for each in names:
        read_method(each)
    import torch
    from transformers.utils import logging

    from nystrom.attention.method_names import split_name
    from nystrom.inspection.budget import check_can_be_planned, choose_plan
    from nystrom.inspection.candidates import read_candidates
    from nystrom.inspection.inspect import inspect_model
    from nystrom.models.files.model_fingerprint import model_fingerprint
    from nystrom.whole_files import check_folder
    from nystrom_lab.data.language.encoder_texts import hold_out, load_encoder, read_batches, read_prose
    from nystrom_lab.data.language.tokenizer import load_tokenizer
    from nystrom_lab.inspection import inspection_rows, plan_rows
    from nystrom_lab.measure.rows import append_rows
    from nystrom_lab.report.inspection import LARGE, inspection_text, plan_text
    from nystrom_lab.training.hardware import usable_device

    read_candidates(names)
    if to is not None:
        check_folder(to)
    if options.threads is not None:
        check_at_least("threads", options.threads, 1)
        torch.set_num_threads(options.threads)
    place = torch.device(usable_device(options.device))
    logging.disable_progress_bar()
    prose = read_prose(options.texts)
    encoder, fingerprint = load_encoder(model, length=options.length), model_fingerprint(model)
    if budget is not None:
        check_can_be_planned(encoder)
    batches = read_batches(prose, load_tokenizer(model), encoder, length=options.length, num_texts=options.num_texts)
    encoder.to(place)  # pyright: ignore[reportArgumentType]
    batches = [{name: x.to(place) for name, x in batch.items()} for batch in batches]
    measured = inspect_model(
        encoder,
        batches,
        methods=names,
        num_queries=options.num_queries,
        whole_model=options.whole_model,
        exact_above=LARGE,
        seed=options.seed,
    )
    rows = inspection_rows(measured, device=torch.cuda.get_device_name(place) if place.type == "cuda" else None)
    text = inspection_text(rows, model=f"{model.resolve().name}, on {prose.name}")
    print(text, end="", flush=True)
    if budget is not None and to is not None:
        candidates = options.methods or (*USUAL, "softmax")
        by, held_out = hold_out(batches)
        plan = choose_plan(
            encoder,
            by,
            budget=budget,
            methods=candidates,
            seconds=measured.times,
            num_exact_heads=options.num_exact_heads,
            held_out=held_out,
        )
        plan.write(to / "plan.json", new=True)
        rows += plan_rows(plan, rows[0])
        said = plan_text(str(plan), plan.measurements, file=to / "plan.json") + "\n"
        text += said
        print(said, end="")
    if to is not None:
        append_rows(to / "rows.csv", [row.with_facts(fingerprint=fingerprint) for row in rows])
        write_whole(to / "verdict.txt", text, new=True)
        with house_style():
            for name, figure in inspection_figures(rows, lambda name: split_name(name)[0]).items():
                for suffix in FORMATS:
                    save_figure(figure, to / f"{name}{suffix}")
        print(f"\nRows, verdict and figures: {to}")
