"""Small data sets of the tasks, figures that are drawn roughly, and hooks around the steps of a training."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


@pytest.fixture(autouse=True)
def drawn_roughly(request, monkeypatch):
    """Runs and studies draw; the tests of reports look at figures, and elsewhere a rough one will do."""
    if "report" in request.path.parts:
        return
    savefig = Figure.savefig

    def rough(self, *args, **kwargs):
        self.set_layout_engine("none")
        return savefig(self, *args, **(kwargs | {"dpi": 20}))

    monkeypatch.setattr(Figure, "savefig", rough)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """48 + 20 + 30 samples of up to 40 tokens: more than the landmarks of a small run, not a multiple of a batch."""
    from nystrom_lab.data.lra.listops.task import prepare_listops

    folder = tmp_path_factory.mktemp("data") / "listops"
    return prepare_listops(folder, train=48, val=20, test=30, min_length=5, max_length=41)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory) -> Path:
    """48 + 20 + 30 pairs of texts of different lengths."""
    from nystrom_lab.data.lra.texts.retrieval import prepare_retrieval

    folder = tmp_path_factory.mktemp("pairs")
    rng = np.random.default_rng(0)
    for name, size in (("train", 48), ("val", 20), ("test", 30)):
        texts = [["ab"[i % 2] * int(n) for i, n in enumerate(rng.integers(3, 40, size=2))] for _ in range(size)]
        lines = [json.dumps({"text1": a, "text2": b, "label": i % 2}) for i, (a, b) in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return prepare_retrieval(folder, folder / "retrieval")


@pytest.fixture(scope="session")
def mlm(tmp_path_factory, tiny_bert, prose) -> Path:
    """Lines of prose as documents for masked words and the order of sentences."""
    from nystrom_lab.data.language.mlm_sop.task import prepare_mlm_sop

    folder = tmp_path_factory.mktemp("mlm")
    (folder / "documents.txt").write_text(prose.read_text().replace("\n", "\n\n"))
    return prepare_mlm_sop([folder / "documents.txt"], folder / "mlm", tokenizer=tiny_bert, length=32, workers=1)


@pytest.fixture
def drawn(monkeypatch):
    """The saved figures."""
    figures, save = [], Figure.savefig

    def keep(figure, *where, **how):
        figures.append(figure)
        save(figure, *where, **how)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


@pytest.fixture
def around_step(hooks) -> Callable[..., None]:
    """Call functions with the weights before and after each step of AdamW."""

    def add(*, before: Callable | None = None, after: Callable | None = None) -> None:
        for call, register in ((before, register_optimizer_step_pre_hook), (after, register_optimizer_step_post_hook)):

            def hook(optimizer, *_, call=call):
                if type(optimizer) is torch.optim.AdamW:
                    call([weight for group in optimizer.param_groups for weight in group["params"]])

            if call is not None:
                hooks.callback(register(hook).remove)

    return add
