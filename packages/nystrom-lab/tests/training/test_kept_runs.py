"""Runs that an earlier version began and lost are read, and end as those of today do.

Each folder in kept_runs.tar.xz holds a run of six steps that version 0.3.0 began and that was stopped in step 5, with
one checkpoint, after step 3; and what it reads. `python test_kept_runs.py FOLDER` makes such runs in a new folder.
"""

import json
import random
import shutil
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from nystrom_lab.cli.main import main
from nystrom_lab.training import presets
from nystrom_lab.training.run_trainer import RunTrainer

KEPT = Path(__file__).with_name("kept_runs.tar.xz")
_STEPS = "--steps 6 --warmup-steps 2 --evaluate-every 3 --batch-size 4 --device cpu --precision float32 --threads 1"
# Words that are read in the folder of the kept run.
COMMANDS = {
    "train": f"train listops --preset demo --options.num-landmarks 4 --log-every 1 --data data --to run {_STEPS}",
    "pretrain": "pretrain --preset demo --options.num-landmarks 4 --log-every 1 --length 16 --num-hidden-layers 1 "
    f"--hidden-size 8 --num-attention-heads 2 --intermediate-size 8 --instances 8 --data data --to run {_STEPS}",
    "finetune": f"finetune --model model --attention nystrom --num-landmarks 4 --data data --to run {_STEPS}",
}


@pytest.fixture
def tiny(monkeypatch):
    """The demo of ListOps with a model of one small layer."""
    key = ("listops", "demo")
    monkeypatch.setitem(presets.PRESETS, key, small(presets.PRESETS[key]))


def small(preset: presets.Preset) -> presets.Preset:
    return replace(preset, hidden_size=8, num_hidden_layers=1, intermediate_size=8)


@pytest.mark.long
@pytest.mark.parametrize("kind", COMMANDS)
def test_a_kept_run_ends_as_a_new_one(kind, tiny, tmp_path, monkeypatch):
    weights, settings = {}, {}
    for name in ("kept", "new"):
        folder = tmp_path / name
        with tarfile.open(KEPT) as kept:
            kept.extractall(folder, filter="data")
        folder /= kind
        if name == "new":
            shutil.rmtree(folder / "run")
        monkeypatch.chdir(folder)
        assert main([*COMMANDS[kind].split(), *(["--resume"] if name == "kept" else [])]) == 0
        weights[name] = load_file(folder / "run" / "checkpoint-6" / "model.safetensors")
        settings[name] = json.loads((folder / "run" / "run.json").read_text())["settings"]
    assert settings["kept"].items() <= settings["new"].items()
    # float32, on another processor, over three steps of Adam; on the one that wrote them, the bits are the same.
    assert_close(weights["kept"], weights["new"], rtol=1e-3, atol=1e-4)


class StoppedError(BaseException):
    """The error that ends a run in the middle."""


def make(to: Path) -> None:
    """Make what the runs read, and begin each."""
    import os

    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    from nystrom_lab.data.language.mlm_sop.task import prepare_mlm_sop
    from nystrom_lab.data.lra.listops.task import prepare_listops

    draw, words = random.Random(0), ["good", "bad", "film", "plot", "slow", "fine", "a", "the"]
    for kind in COMMANDS:
        (to / kind).mkdir(parents=True)
    prepare_listops(to / "train" / "data", train=16, val=8, test=8, min_length=5, max_length=30)
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])}
    model, texts = to / "finetune" / "model", to / "texts.txt"
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=24, **sizes)).save_pretrained(model)
    BertTokenizer(vocab=vocabulary).save_pretrained(model)
    texts.write_text("\n\n".join(" . ".join(" ".join(draw.choices(words, k=6)) for _ in range(9)) for _ in range(40)))
    prepare_mlm_sop([texts], to / "pretrain" / "data", tokenizer=model, length=16, workers=1)
    texts.unlink()
    (to / "finetune" / "data").mkdir()
    for name, count in (("train", 24), ("dev", 8), ("test", 8)):
        rows = [f"{' '.join(draw.choices(words, k=6))}\t{i % 2}" for i in range(count)]
        (to / "finetune" / "data" / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    key, step = ("listops", "demo"), RunTrainer.training_step
    presets.PRESETS[key] = small(presets.PRESETS[key])

    def stopped(self, *given):
        if self.state.global_step == 4:
            raise StoppedError
        return step(self, *given)

    RunTrainer.training_step = stopped
    here = Path.cwd()
    for kind, words in COMMANDS.items():
        os.chdir(to / kind)
        try:
            main(words.split())
        except StoppedError:
            print(f"stopped {kind}")
        os.chdir(here)


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve())
