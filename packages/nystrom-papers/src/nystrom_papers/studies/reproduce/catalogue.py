"""The studies by name: the module of each, and its facts. Needs no torch."""

import ast
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nystrom.checks import check_names

if TYPE_CHECKING:
    from nystrom_papers.studies.reproduce.study import Study

# Modules of `nystrom_papers.studies` whose `STUDIES` hold them, in the order of the pages.
_MODULES = {
    "nystromformer-table-1": "speed.as_printed",
    "nystromformer-table-2": "training.finetuned",
    "nystromformer-table-3": "arena.paper_tables",
    "nystromformer-figure-2": "approximation.attention_maps",
    "nystromformer-figure-3": "approximation.attention_maps",
    "nystromformer-figure-5": "training.pretrained",
    "nystromformer-figure-6": "training.pretrained",
    "supplement-table-1": "training.finetuned",
    "supplement-figure-1": "approximation.landmark_choice",
    "supplement-figure-2": "approximation.landmark_choice",
    "supplement-figure-3": "approximation.pseudoinverse",
    "supplement-figure-4": "approximation.pseudoinverse",
    "supplement-figure-5": "training.pretrained",
    "supplement-proposition-1": "approximation.error_bound",
    "skyformer-table-1": "arena.paper_tables",
    "skyformer-table-2": "speed.as_printed",
    "skyformer-figure-1": "approximation.spectral_norm",
    "skyformer-figure-2": "stability.validation_accuracy",
    "skyformer-lemma-1": "approximation.completion",
    "skyformer-gradients": "stability.gradients",
    "skyformer-theorem-2": "approximation.statistical_dimension",
    "skyformer-lemma-3": "approximation.preconditioner",
    "skyformer-appendix-f": "stability.instability",
    "inversion": "approximation.inversion",
    "complexity": "approximation.complexity",
    "low-rank": "approximation.low_rank",
    "near-far": "fidelity.front",
    "long-inputs": "fidelity.long_inputs",
    "near-far-context": "fidelity.contexts",
    "slides": "fidelity.slides",
    "causal-language": "fidelity.causal_language",
    "inspect-plans": "fidelity.planned",
    "blog": "fill_mask",
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The facts of a study; see `nystrom_papers.studies.reproduce.study.Study`."""

    shows: str
    source: str
    needs: str = ""
    paper_needs: str = ""
    minutes: float | None = None
    trains: bool = False


def _entries() -> dict[str, Entry]:
    """The facts of all studies, literals in `STUDIES`: read there, since importing the modules takes seconds."""
    entries: dict[str, Entry] = {}
    for module in dict.fromkeys(_MODULES.values()):
        tree = ast.parse((Path(__file__).parents[1] / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
        (studies,) = (
            node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "STUDIES"
        )
        assert isinstance(studies, ast.Dict), module
        for name, study in zip(studies.keys, studies.values, strict=True):
            assert isinstance(name, ast.Constant), module
            assert isinstance(study, ast.Call), module
            facts: dict[str, Any] = {
                fact.arg: ast.literal_eval(fact.value) for fact in study.keywords if fact.arg in Entry.__annotations__
            }
            entries[str(name.value)] = Entry(**facts)
    return {name: entries[name] for name in _MODULES}


CATALOGUE = _entries()


def find_study(name: str) -> "Study":
    """Look up a study by name; its module is imported now.

    Raises:
        ValueError: The name is unknown.
    """
    check_names("study", [name], CATALOGUE)
    return import_module(f"nystrom_papers.studies.{_MODULES[name]}").STUDIES[name]
