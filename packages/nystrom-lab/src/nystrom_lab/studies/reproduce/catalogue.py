"""The tables, figures and measurable claims of the papers, by name, in one table. Needs no torch."""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from nystrom.checks import check_names

if TYPE_CHECKING:
    from nystrom_lab.studies.reproduce.study import Study


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A study in the list.

    Attributes:
        shows: What it shows, in a few words.
        source: Its place in the papers.
        home: The module in `nystrom_lab.studies` whose `STUDIES` holds it.
        needs: Requirements at the small size, beyond this library; "" for none.
        paper_needs: Additional requirements of the paper's size.
        minutes: Approximate minutes of the small size on one thread; None if they were not measured.
        trains: Whether it trains models or reads trained runs; --all leaves such a study out until it has rows.
    """

    shows: str
    source: str
    home: str
    needs: str = ""
    paper_needs: str = ""
    minutes: float | None = None
    trains: bool = False


_N = "Nyströmformer, arXiv:2102.03902"
_U = "Nyströmformer, supplement"
_S = "Skyformer, arXiv:2111.00035"
_ENCODER = "an encoder: nystrom[real] or --model"
_BERT = "--model with bert-base-cased"
_TRAINED_BERT = "--model with a trained BERT-base"
# Hours estimated in docs/papers.md, not measured.
_ARENA = "about 50 hours on an H200"

CATALOGUE: dict[str, Entry] = {
    "nystromformer-table-1": Entry(
        shows="time and memory of attention over the length",
        source=f"{_N}, Table 1",
        home="speed.as_printed",
        paper_needs="a GPU",
        minutes=1.4,
    ),
    "nystromformer-table-2": Entry(
        shows="GLUE and IMDB after fine-tuning",
        source=f"{_N}, Table 2",
        home="training.finetuned",
        needs="--data with sst2, mrpc ...",
        paper_needs=f"{_TRAINED_BERT}, about 1 hour on an A100, and 75 to pretrain one with Nyström attention",
        trains=True,
    ),
    "nystromformer-table-3": Entry(
        shows="accuracies in the Long Range Arena",
        source=f"{_N}, Table 3",
        home="arena.paper_tables",
        needs="--runs with those of nystrom lra run",
        paper_needs=_ARENA,
        trains=True,
    ),
    "nystromformer-figure-2": Entry(
        shows="one attention matrix and the three factors of its approximation",
        source=f"{_N}, Fig. 2",
        home="approximation.attention_maps",
        needs=_ENCODER,
        paper_needs=_TRAINED_BERT,
        minutes=0.3,
    ),
    "nystromformer-figure-3": Entry(
        shows="attention of several heads, exact above approximate",
        source=f"{_N}, Fig. 3",
        home="approximation.attention_maps",
        needs=_ENCODER,
        paper_needs=_TRAINED_BERT,
        minutes=0.4,
    ),
    "nystromformer-figure-5": Entry(
        shows="MLM and SOP of small models over the steps",
        source=f"{_N}, Fig. 5",
        home="training.pretrained",
        needs="--data with mlm",
        paper_needs="about 10 hours on an A100",
        trains=True,
    ),
    "nystromformer-figure-6": Entry(
        shows="MLM and SOP of base models over the steps",
        source=f"{_N}, Fig. 6",
        home="training.pretrained",
        needs="--data with mlm",
        paper_needs=f"{_TRAINED_BERT}, about 190 hours on an A100",
        trains=True,
    ),
    "supplement-table-1": Entry(
        shows="GLUE after pretraining on 512 and 1,024 tokens",
        source=f"{_U}, Table 1",
        home="training.finetuned",
        needs="--data with imdb",
        paper_needs=f"{_TRAINED_BERT}, about 10 hours on an A100",
        trains=True,
    ),
    "supplement-figure-1": Entry(
        shows="attention matrices from random landmarks, segment means and k-means, beside the softmax matrix",
        source=f"{_U}, Fig. 1",
        home="approximation.landmark_choice",
        needs=_ENCODER,
        paper_needs=_TRAINED_BERT,
        minutes=1.9,
    ),
    "supplement-figure-2": Entry(
        shows="attention matrices from 16, 64 and 256 landmarks, beside the softmax matrix",
        source=f"{_U}, Fig. 2",
        home="approximation.landmark_choice",
        needs=_ENCODER,
        paper_needs=_TRAINED_BERT,
        minutes=1.3,
    ),
    "supplement-figure-3": Entry(
        shows="the pseudoinverse after 2, 4 and 6 iterations, and the order of convergence",
        source=f"{_U}, Fig. 3 and Lemma 1",
        home="approximation.pseudoinverse",
        needs=_ENCODER,
        paper_needs=_TRAINED_BERT,
        minutes=0.6,
    ),
    "supplement-figure-4": Entry(
        shows="the pseudoinverse of six heads after 6 iterations",
        source=f"{_U}, Fig. 4",
        home="approximation.pseudoinverse",
        needs=_ENCODER,
        paper_needs=_TRAINED_BERT,
        minutes=0.1,
    ),
    "supplement-figure-5": Entry(
        shows="MLM and SOP with 1,024 tokens",
        source=f"{_U}, Fig. 5",
        home="training.pretrained",
        needs="--data with mlm",
        paper_needs="about 45 hours on an A100",
        trains=True,
    ),
    "supplement-proposition-1": Entry(
        shows="the bound on the error beside the error, over the landmarks",
        source=f"{_U}, Proposition 1 and Lemma 2",
        home="approximation.error_bound",
        needs=_ENCODER,
        paper_needs=_TRAINED_BERT,
        minutes=0.8,
    ),
    "skyformer-table-1": Entry(
        shows="accuracies in the Long Range Arena",
        source=f"{_S}, Table 1",
        home="arena.paper_tables",
        needs="--runs with those of nystrom lra run",
        paper_needs=_ARENA,
        trains=True,
    ),
    "skyformer-table-2": Entry(
        shows="time and memory of a training step of each task",
        source=f"{_S}, Table 2",
        home="speed.as_printed",
        paper_needs="a GPU",
        minutes=3,
    ),
    "skyformer-figure-1": Entry(
        shows="spectral norm of the error of each method over features and length",
        source=f"{_S}, Fig. 1",
        home="approximation.spectral_norm",
        needs=_ENCODER,
        paper_needs=_BERT,
        minutes=1,
    ),
    "skyformer-figure-2": Entry(
        shows="validation accuracy over the seconds and steps of training",
        source=f"{_S}, Fig. 2",
        home="stability.validation_accuracy",
        needs="--runs with those of nystrom lra run, or the file of their curves",
        paper_needs=_ARENA,
        trains=True,
    ),
    "skyformer-lemma-1": Entry(
        shows="smallest eigenvalues of score matrices, and of their completion to queries and keys",
        source=f"{_S}, Lemma 1 and eq. 4",
        home="approximation.completion",
        needs=_ENCODER,
        paper_needs=_TRAINED_BERT,
        minutes=0.1,
    ),
    "skyformer-gradients": Entry(
        shows="gradients through eq. 4-6 as printed, and through this library's variant, beside softmax's",
        source=f"{_S}, section 4.5 (remark)",
        home="stability.gradients",
        needs=_ENCODER,
        minutes=0.2,
    ),
    "skyformer-theorem-2": Entry(
        shows="error of independent draws beside the statistical dimension",
        source=f"{_S}, Definition 2 and Theorem 2",
        home="approximation.statistical_dimension",
        needs=_ENCODER,
        minutes=2.7,
    ),
    "skyformer-lemma-3": Entry(
        shows="singular values of the scaled landmark matrix, beside the lemma's sharp form",
        source=f"{_S}, Lemma 3",
        home="approximation.preconditioner",
        needs=_ENCODER,
        paper_needs=_TRAINED_BERT,
        minutes=0.1,
    ),
    "skyformer-appendix-f": Entry(
        shows="instability of training, relative to softmax attention",
        source=f"{_S}, section 4.1, and Appendix F in NeurIPS' file of appendices",
        home="stability.instability",
        paper_needs="--data with text, retrieval and image",
        minutes=3,
        trains=True,
    ),
    "inversion": Entry(
        shows="inverses by iterations beside solvers: time, error, and error of the gradient",
        source=f"{_S}, section 4.4; {_N}, section 3",
        home="approximation.inversion",
        needs=_ENCODER,
        paper_needs=f"{_TRAINED_BERT}, and a GPU",
        minutes=1.3,
    ),
    "complexity": Entry(
        shows="counted multiplications and stored numbers beside the formulas",
        source=f"{_N}, section 3, and the description page",
        home="approximation.complexity",
        minutes=0.6,
    ),
    "low-rank": Entry(
        shows="singular values of softmax and Gaussian score matrices",
        source=f"{_N}, section 3; {_S}, sections 2 and 4",
        home="approximation.low_rank",
        needs=_ENCODER,
        minutes=0.2,
    ),
    "near-far": Entry(
        shows="error over time of every method on real queries, keys and values",
        source="this library",
        home="fidelity.front",
        needs=_ENCODER,
        minutes=1.7,
    ),
    "long-inputs": Entry(
        shows="an encoder on texts beyond its 512 tokens: error, time and memory at each length",
        source="this library",
        home="fidelity.long_inputs",
        needs=_ENCODER,
        minutes=3,
    ),
    "near-far-context": Entry(
        shows="a context that is compressed once and asked many times: error over the entries kept, and time",
        source="this library",
        home="fidelity.contexts",
        needs=_ENCODER,
        minutes=1,
    ),
    "slides": Entry(
        shows="bags of tiles: the order of the tiles, and what a layer costs beside others",
        source="this library",
        home="fidelity.slides",
        trains=True,
    ),
    "causal-language": Entry(
        shows="a causal language model with near_far, a window with sinks and heavy hitters: perplexity by position",
        source="this library",
        home="fidelity.causal_language",
        needs="--texts with long documents, one a line",
        trains=True,
    ),
    "inspect-calibration": Entry(
        shows="errors of attention from sampled queries beside the exact ones",
        source="this library",
        home="fidelity.calibration",
        needs=_ENCODER,
        minutes=0.2,
    ),
    "inspect-plans": Entry(
        shows="an encoder with near_far and with plans: error, time, memory, and a retrieval",
        source="this library",
        home="fidelity.planned",
        needs=_ENCODER,
        minutes=3,
    ),
    "arena-ablation": Entry(
        shows="how far each part of a model lifts accuracy on Text and ListOps, and what attention adds to all",
        source="this library",
        home="arena.ablation",
        needs="--data with text",
        trains=True,
    ),
    "blog": Entry(
        shows="the masked word of the Hugging Face post, its five scores",
        source="Hugging Face, post on Nyströmformer",
        home="fill_mask",
        needs="--model with a published Nyströmformer",
    ),
}


def find_study(name: str) -> "Study":
    """Look up a study by name; its module is imported now.

    Raises:
        ValueError: The name is unknown.
    """
    check_names("study", [name], CATALOGUE)
    return import_module(f"nystrom_lab.studies.{CATALOGUE[name].home}").STUDIES[name]
