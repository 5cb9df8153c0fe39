"""The masked word of the Hugging Face post on Nyströmformer: its sentence, its five words and their scores.

The post gives "Paris is the [MASK] of France." to uw-madison/nystromformer-512 and prints the five most probable words
with their scores. Here the same pipeline of transformers fills the mask with that model, read from a folder into the
encoder of this library.

Claim: the words and scores of the post are those of the model. Rule: the five most probable words are the same in the
same order, and each score is within .0005 of the printed one, which leaves room for other kernels. Fewer than five
words decide nothing.

Source: the post "Nyströmformer: Approximating self-attention in linear time and memory via the Nyström method"
(Hugging Face, 2022).
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nystrom.models.configuration import EncoderConfig
from nystrom.models.files.loading import check_weights
from nystrom.models.files.tokenizer import load_tokenizer
from nystrom.models.heads.language import EncoderForMaskedLM
from nystrom_lab.measure.rows import Row, cpu_name, new_row
from nystrom_lab.report.plots.canvas import COLUMN, REFERENCE, figure_of, method_look
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study
from nystrom_lab.training.run.progress import no_file_bars

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SENTENCE = "Paris is the [MASK] of France."
PRINTED: dict[str, float] = {
    "capital": 0.829957902431488,
    "birthplace": 0.022157637402415276,
    "name": 0.01904447190463543,
    "kingdom": 0.017583081498742104,
    "city": 0.005948934704065323,
}
_WITHIN = 0.0005
_QUANTITY = "score of a word"


def _plan(setting: Setting) -> Plan:
    folder = setting.model
    if folder is None:
        raise ValueError(
            "the post's scores are those of uw-madison/nystromformer-512: name the folder of that model, with its "
            "tokenizer and its weights as safetensors, with --model."
        )
    if not folder.is_dir():
        raise ValueError(f"--model {folder} is not a folder; expected one with config.json and safetensors.")
    with no_file_bars():
        config = EncoderConfig.from_pretrained(folder)
    if not any("ForMaskedLM" in name for name in config.architectures or ()):
        found = " ".join(config.architectures or ()) or "a model that does not say what it is"
        raise ValueError(f"--model {folder} holds {found}; expected a Nyströmformer with the head that fills masks.")
    check_weights(folder)
    if load_tokenizer(folder).mask_token != "[MASK]":
        raise ValueError(f"--model {folder} has a tokenizer without [MASK]; expected the model's own.")
    said = {"model": folder.name, "sentence": SENTENCE}
    return Plan([Part("sentence", partial(_measure, folder))], said, "")


def _measure(model: Path, folder: Path) -> Iterable[Row]:
    from transformers import pipeline

    with no_file_bars():
        parts: Any = {"model": EncoderForMaskedLM.from_pretrained(model), "tokenizer": load_tokenizer(model)}
    fillings: Any = pipeline("fill-mask", **parts, device="cpu")(SENTENCE, top_k=len(PRINTED))
    return [
        new_row(
            study="",
            quantity=_QUANTITY,
            method="nystrom",
            value=filling["score"],
            unit="",
            facts={"rank": rank, "word": filling["token_str"].strip()},
            device=cpu_name(),
        )
        for rank, filling in enumerate(fillings, start=1)
    ]


def _filled(rows: Sequence[Row]) -> list[tuple[str, float]]:
    """Words and scores, the most probable first."""
    ranked = sorted(rows, key=lambda row: int(row.facts["rank"]))
    return [(row.facts["word"], row.value) for row in ranked]


def _tables(rows: Sequence[Row]) -> Sequence[Table]:
    lines = [
        [str(rank), printed, f"{score:.4f}", word, f"{value:.4f}"]
        for rank, ((printed, score), (word, value)) in enumerate(zip(PRINTED.items(), _filled(rows), strict=True), 1)
    ]
    return [Table(SENTENCE, ["rank", "printed", "score", "here", "score here"], lines)]


def _verdicts(rows: Sequence[Row]) -> Sequence[Verdict]:
    filled = _filled(rows)
    if len(filled) < len(PRINTED):
        claim = "The five words and their scores are those of the post."
        return [Verdict(claim, None, f"of {len(PRINTED)} words {len(filled)} are there.")]
    same = [word for word, _ in filled] == list(PRINTED)
    furthest = max(abs(value - PRINTED[word]) for word, value in filled) if same else None
    return [
        Verdict(
            "The five words and their scores are those of the post.",
            furthest is not None and furthest <= _WITHIN,
            f"the words here are {', '.join(word for word, _ in filled)}"
            + ("." if furthest is None else f", and the scores differ by {furthest:.5f} at most."),
        )
    ]


def _figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    figure = figure_of(COLUMN, 2.2)
    axes = figure.subplots()
    filled, places = _filled(rows), range(len(PRINTED))
    look = method_look("nystrom")
    axes.plot(list(PRINTED.values()), places, "D", color=REFERENCE, markersize=6, markerfacecolor="none", label="post")
    axes.plot([value for _, value in filled], places, look.marker, color=look.colour, label="here")
    pairs = zip(PRINTED, filled, strict=True)
    labels = [word if word == printed else f"{word} ({printed})" for printed, (word, _) in pairs]
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("score (probability of the word)")
    axes.set_title(SENTENCE)
    axes.grid(True, axis="x")
    axes.legend()
    return {"": figure}


STUDIES = {
    "blog": Study(
        shows="the masked word of the Hugging Face post, its five scores",
        source="Hugging Face, post on Nyströmformer",
        needs="--model with a published Nyströmformer",
        plan=_plan,
        tables=_tables,
        verdicts=_verdicts,
        figures=_figures,
    )
}
