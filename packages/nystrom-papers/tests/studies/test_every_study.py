"""Facts of all studies: a small one runs to its end, missing rows decide nothing, short texts end it before work."""

from contextlib import suppress

import pytest
import torch

from nystrom_papers.studies.approximation import completion, inversion, preconditioner, statistical_dimension
from nystrom_papers.studies.reproduce.catalogue import CATALOGUE, find_study
from nystrom_papers.studies.reproduce.run import check_study, run_study
from nystrom_papers.studies.reproduce.study import Setting

_CPU = {(inversion, "_NUMBERS"): (8,), (inversion, "_TURNS"): 2}
_CPU |= {(inversion, "_places"): lambda: {"CPU": torch.device("cpu")}}
_FEW = statistical_dimension._EXTENTS | {"small": statistical_dimension._Extent(16, (4, 16), 20, (8, 16, 32))}
# Options that make a study small; words of the names of the parts that are run, and its figures.
SMALL = {
    "complexity": ({}, ("n=512",), ("", "formula")),
    "inversion": (_CPU, ("",), ("", "made", "time")),
    "low-rank": ({}, ("-n=64-",), ("", "rank", "condition")),
    "skyformer-lemma-1": ({(completion, "_TOKENS"): 16}, ("pretrained-layer=0", "random"), ("",)),
    "skyformer-lemma-3": ({(preconditioner, "_NUMBERS"): (16,)}, ("pretrained", "each-twice"), ("",)),
    "skyformer-theorem-2": (
        {(statistical_dimension, "_EXTENTS"): _FEW}, ("",), ("", "draws", "lengths", "kernels")
    ),
    "supplement-figure-1": ({}, ("pretrained-layer=0", "times-n=512"), ("",)),
    "supplement-figure-3": ({}, ("pictures", "-m=16"), ("", "convergence")),
    "supplement-figure-4": ({}, ("",), ("",)),
    "supplement-proposition-1": ({}, ("pretrained-",), ("", "lemma")),
}  # fmt: skip


def killed(folder):
    raise KeyboardInterrupt


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_a_small_study_goes_on_after_its_first_part_and_ends_in_tables_and_figures(
    name, tiny_bert, prose, tmp_path, monkeypatch
):
    changes, words, figures = SMALL[name]
    for (module, constant), value in changes.items():
        monkeypatch.setattr(module, constant, value)
    job = check_study(name, Setting(model=tiny_bert, texts=(prose, prose)), tmp_path)
    parts = [part for part in job.plan.parts if any(word in part.name for word in words)]
    cut = [parts[0], *(part._replace(measure=killed) for part in parts[1:])]
    with suppress(KeyboardInterrupt):
        run_study(job._replace(plan=job.plan._replace(parts=cut)), lambda line: None)
    said = []
    summary = run_study(job._replace(plan=job.plan._replace(parts=parts)), said.append)
    assert said[0].endswith(f"continuing, 1 of {len(parts)} parts have their rows.")
    assert len(said) == len(parts)
    assert summary.figures == [f"{name}{'-' if which else ''}{which}.png" for which in figures]
    assert all(table.lines for table in summary.tables)
    assert len({verdict.claim for verdict in summary.verdicts}) == len(summary.verdicts)


@pytest.mark.parametrize(
    "name", [name for name in CATALOGUE if name not in ("nystromformer-table-3", "skyformer-table-1")]
)
def test_what_was_not_measured_decides_nothing(name):
    assert {verdict.agrees for verdict in find_study(name).verdicts([])} <= {None}


@pytest.mark.parametrize("name", [name for name, entry in CATALOGUE.items() if entry.needs.startswith("an encoder")])
def test_texts_that_are_too_short_end_a_study_before_any_work(name, tiny_bert, tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("the river and the stone " * 2)
    with pytest.raises(ValueError, match="expected at least") as error:
        check_study(name, Setting(model=tiny_bert, texts=(file,)), tmp_path / "to")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "to").exists()
