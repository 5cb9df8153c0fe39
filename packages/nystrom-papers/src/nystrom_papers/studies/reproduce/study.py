"""The parts of a study, and the setting in which it runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, ParamSpec, TypeAlias

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.table import Table
from nystrom_papers.report.summary import Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

P = ParamSpec("P")
Size = Literal["small", "paper"]
TrainedIn = Literal["float32", "bfloat16"]
# Figures by name, "" for the main one.
Figures: TypeAlias = "Mapping[str, Figure]"
NO_PAPER = "no paper has it"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The options of a study.

    Attributes:
        size: "small", minutes on two cores, or "paper", the paper's setting, except as stated in `Plan.differs`.
        model: Folder of a Hugging Face encoder; None uses all-MiniLM-L6-v2 of the extra `real`.
        texts: Text files, which may be compressed; by default the language reference that comes with Python.
        data: Folder with the data of each task in a subfolder of its name (listops, text, mlm, mrpc ...); None
            generates what can be generated.
        runs: Folder of trained runs of `nystrom lra run`, for the studies that read them, or the file of their curves.
        precision: Precision in which studies of size "small" train.
    """

    size: Size = "small"
    model: Path | None = None
    texts: tuple[Path, ...] = ()
    data: Path | None = None
    runs: Path | None = None
    precision: TrainedIn = "bfloat16"


class Part(NamedTuple):
    """A part of the work; its rows are written all at once when it is done.

    Attributes:
        name: Name, unique in the study and without blanks, such as "n=512-m=64"; an interrupted study continues
            with the parts that have no rows.
        measure: Returns the rows. It is given the folder of the study, where it may also leave arrays for the figures.
    """

    name: str
    measure: Callable[[Path], Iterable[Row]]


def part(name: str, measure: Callable[P, Iterable[Row]], *given: P.args, **named: P.kwargs) -> Part:
    """A part that needs no folder: a function and what it is given."""
    return Part(name, lambda folder: measure(*given, **named))


class Plan(NamedTuple):
    """All the work of a study in one setting, checked but not started.

    Attributes:
        parts: The parts, in order.
        setting: The setting, by name: "model", "texts", "lengths" ... A folder that holds rows of another setting
            is refused.
        differs: How this differs from the paper's setting; "" if it does not.
    """

    parts: Sequence[Part]
    setting: Mapping[str, str]
    differs: str


def in_words(**setting: object) -> dict[str, str]:
    """A setting in words, for `Plan.setting`: a sequence as its entries, one after the other."""
    return {
        name: str(value) if isinstance(value, str) or not isinstance(value, Iterable) else " ".join(map(str, value))
        for name, value in setting.items()
    }


def beside_none(setting: Setting, left_out: str) -> str:
    """`Plan.differs` of a study that is in no paper: what its small size leaves out, and that no paper has it."""
    return NO_PAPER if setting.size == "paper" else f"{left_out}; {NO_PAPER}"


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study of the papers: how it is measured, and what its rows say.

    Attributes:
        shows: The content of the study, in a few words.
        source: Place in the papers, or `OURS`.
        plan: Checks a setting and divides its work into parts. Before any work it raises ValueError for what cannot be
            run: a model without weights, texts that are too short, a size that needs something missing.
        tables: Tables of the rows, with the papers' printed numbers beside ours.
        verdicts: The claims of the paper, and what the rows say about each.
        figures: Draws the rows, and the arrays in the folder.
        differs: `Plan.differs` from the rows, for a study of runs that others made; None if the plan knows it.
        needs: Requirements at the small size, beyond this library; "" for none.
        paper_needs: Additional requirements of the paper's size.
        minutes: Approximate minutes of the small size on one thread; None if they were not measured.
        trains: Whether it trains models or reads trained runs; --all leaves such a study out until it has rows.
    """

    shows: str
    source: str
    plan: Callable[[Setting], Plan]
    tables: Callable[[Sequence[Row]], Sequence[Table]]
    verdicts: Callable[[Sequence[Row]], Sequence[Verdict]]
    figures: Callable[[Sequence[Row], Path], Figures]
    differs: Callable[[Sequence[Row]], str] | None = None
    needs: str = ""
    paper_needs: str = ""
    minutes: float | None = None
    trains: bool = False
