"""The masked word of the Hugging Face post on Nyströmformer: its sentence, its five words and their scores.

The post gives "Paris is the [MASK] of France." to uw-madison/nystromformer-512 and prints the five most probable words
with their scores. Here the same pipeline of transformers fills the mask with that model, read from a folder into the
encoder of this library.

Source: the post "Nyströmformer: Approximating self-attention in linear time and memory via the Nyström method"
(Hugging Face, 2022).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from nystrom.models.configuration import EncoderConfig
from nystrom.models.files.loading import check_weights
from nystrom.models.files.model_fingerprint import model_fingerprint
from nystrom.models.heads.language import EncoderForMaskedLM
from nystrom_lab.data.language.tokenizer import load_tokenizer
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.table import Table
from nystrom_lab.training.run_progress import no_file_bars
from nystrom_papers.studies.reproduce.declared import Answer, Claim, Lines, declare, each
from nystrom_papers.studies.reproduce.study import Plan, Setting, part

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
        architectures = " ".join(config.architectures or ()) or "a model that does not say what it is"
        raise ValueError(
            f"--model {folder} holds {architectures}; expected a Nyströmformer with the head that fills masks."
        )
    check_weights(folder)
    if load_tokenizer(folder).mask_token != "[MASK]":
        raise ValueError(f"--model {folder} has a tokenizer without [MASK]; expected the model's own.")
    said = {"model": folder.name, "fingerprint": model_fingerprint(folder), "sentence": SENTENCE}
    return Plan([part("sentence", _measure, folder)], said, "")


def _measure(model: Path) -> Iterable[Row]:
    from transformers import pipeline

    with no_file_bars():
        parts: Any = {"model": EncoderForMaskedLM.from_pretrained(model), "tokenizer": load_tokenizer(model)}
    fillings: Any = pipeline("fill-mask", **parts, device="cpu")(SENTENCE, top_k=len(PRINTED))
    return [
        Row(
            quantity=_QUANTITY,
            method="nystrom",
            value=filling["score"],
            facts={"rank": rank, "word": filling["token_str"].strip()},
        )
        for rank, filling in enumerate(fillings, start=1)
    ]


def _filled(rows: pd.DataFrame) -> list[Any]:
    return sorted(each(rows, _QUANTITY), key=lambda row: int(row.rank))


def _table(rows: pd.DataFrame) -> list[Table]:
    lines = [
        [row.rank, printed, f"{score:.4f}", row.word, f"{row.value:.4f}"]
        for (printed, score), row in zip(PRINTED.items(), _filled(rows), strict=True)
    ]
    return [Table(SENTENCE, ["rank", "printed", "score", "here", "score here"], lines)]


def _as_printed(rows: pd.DataFrame) -> Answer:
    """The same words in the same order, and each score as near as other kernels leave it."""
    filled = [(row.word, row.value) for row in _filled(rows)]
    if len(filled) < len(PRINTED):
        return None, f"of {len(PRINTED)} words {len(filled)} are there."
    numbers = f"the words here are {', '.join(word for word, _ in filled)}"
    if [word for word, _ in filled] != list(PRINTED):
        return False, f"{numbers}."
    furthest = max(abs(value - PRINTED[word]) for word, value in filled)
    return furthest <= _WITHIN, f"{numbers}, and the scores differ by {furthest:.5f} at most."


STUDIES = {
    "blog": declare(
        shows="the masked word of the Hugging Face post, its five scores",
        source="Hugging Face, post on Nyströmformer",
        needs="--model with a published Nyströmformer",
        plan=_plan,
        tables=[_table],
        claims=[
            Claim(
                "The five words and their scores are those of the post.", _as_printed,
                "Hugging Face, post on Nyströmformer",
            )
        ],
        figures={
            "": Lines(
                of={"quantity": _QUANTITY}, over="rank", panel=SENTENCE, x_label="rank", y_label="score of the word",
                band="", options={"log_x": False},
            )
        },
    )
}  # fmt: skip
