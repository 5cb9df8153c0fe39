import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, RobertaConfig, RobertaModel

from nystrom.models import EncoderConfig, EncoderModel
from nystrom_lab.measure.rows import Row, append_rows, read_rows
from nystrom_papers.bench import engine_kinds
from nystrom_papers.bench.engine_files import make_file, stretch_model, write_tokens
from nystrom_papers.bench.engine_kinds import ENGINES, EXACT, MODEL, TOKENS, EngineJob
from nystrom_papers.bench.engine_process import engine_process
from nystrom_papers.bench.engines import EnginesOptions, Measured, rows_of, run_engines
from nystrom_papers.report.engines import BESIDE_BEST, BESIDE_TORCH, ERROR, MEMORY, TIME, engines_table

LONG = 48


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"lengths": ()}, "lengths is empty"),
        ({"lengths": (4,)}, "an entry of lengths"),
        ({"threads": 0}, "threads"),
        ({"threads": 100_000}, "threads is 100000, but this process may use"),
        ({"turns": 0}, "turns"),
        ({"engines": ("onnx-runtime",)}, "onnxruntime"),
    ],
)
def test_what_no_engine_can_be_asked_is_refused_before_anything_runs(wrong, said):
    with pytest.raises(ValueError, match=said):
        EnginesOptions(Path("model"), Path("rows.csv"), **wrong)


def test_a_model_that_other_engines_do_not_read_is_refused(tmp_path):
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    EncoderModel(EncoderConfig(**sizes, intermediate_size=8)).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="which no other engine reads"):
        run_engines(EnginesOptions(tmp_path / "ours", tmp_path / "rows.csv"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "has 48 tokens already"),
        ({"study": "model"}, "of study 'model', not 'engines'"),
        ({"facts": {"model": "other", "threads": 1}}, "of model 'other', not 'tiny-bert'"),
        ({"facts": {"model": "tiny-bert", "threads": 2}}, "of threads '2', not '1'"),
    ],
)
def test_a_file_takes_rows_of_other_lengths_alone(tmp_path, tiny_bert, changes, said):
    row = replace(BLANK, quantity="time", method=EXACT, facts={"model": "tiny-bert", "threads": 1})
    append_rows(tmp_path / "rows.csv", [replace(row, **changes)])
    before = (tmp_path / "rows.csv").read_bytes()
    with pytest.raises(ValueError, match=said):
        run_engines(EnginesOptions(tiny_bert, tmp_path / "rows.csv", lengths=(96, LONG), threads=1))
    assert (tmp_path / "rows.csv").read_bytes() == before


def test_positions_are_stretched_and_the_rest_is_the_same(tmp_path, tiny_bert):
    stretch_model(tiny_bert, LONG, tmp_path / "long")
    before, after = (AutoModel.from_pretrained(folder).state_dict() for folder in (tiny_bert, tmp_path / "long"))
    name = "embeddings.position_embeddings.weight"
    old, new = before.pop(name), after.pop(name)
    assert new.shape == (LONG, old.shape[1])
    torch.testing.assert_close(new[[0, -1]], old[[0, -1]])
    torch.testing.assert_close(before, after, rtol=0, atol=0)


def test_rows_that_no_token_has_stay(tmp_path):
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = RobertaModel(RobertaConfig(**sizes, intermediate_size=8, max_position_embeddings=18))
    model.save_pretrained(tmp_path / "short")
    stretch_model(tmp_path / "short", LONG, tmp_path / "long")
    table = AutoModel.from_pretrained(tmp_path / "long").embeddings.position_embeddings.weight
    assert len(table) == 2 + LONG
    torch.testing.assert_close(table[:3], model.embeddings.position_embeddings.weight[:3], rtol=0, atol=0)


@pytest.fixture(scope="module")
def job(tmp_path_factory, tiny_bert):
    place = tmp_path_factory.mktemp("engines")
    stretch_model(tiny_bert, LONG, place / MODEL)
    write_tokens(place / MODEL, LONG, place / TOKENS)
    return EngineJob(place, tiny_bert, threads=torch.get_num_threads())


def error_of(name, job):
    exact, out = (ENGINES[each].load(job)() for each in (EXACT, name))
    assert out.shape == exact.shape == (LONG, 32)
    return np.linalg.norm(out - exact) / np.linalg.norm(exact)


@pytest.mark.long
@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime-mask", "onnxruntime-flash", "onnxruntime-int8"])
def test_a_file_of_onnxruntime_gives_the_hidden_states_of_torch(job, name):
    pytest.importorskip("onnxruntime")
    for file in ENGINES[name].files:
        make_file(file, job.place)
    # Rounding over three layers in float32; the linear layers in int8 are a few percent off in each.
    assert error_of(name, job) < (1e-5 if ENGINES[name].exact else 0.5)


def test_the_flash_operator_stands_in_the_file_once_a_layer(job):
    onnx = pytest.importorskip("onnx")
    make_file("flash.onnx", job.place)
    made = onnx.load(job.place / "flash.onnx")
    assert [node.op_type for node in made.graph.node].count("MultiHeadAttention") == 3
    assert "Softmax" not in {node.op_type for node in made.graph.node}


def test_pieces_are_read_by_the_model_as_it_was_trained(job, tiny_bert):
    model, ids = AutoModel.from_pretrained(tiny_bert).eval(), torch.from_numpy(np.load(job.place / TOKENS))
    with torch.inference_mode():
        wanted = torch.cat([model(ids[:, part]).last_hidden_state[0] for part in (slice(0, 32), slice(32, LONG))])
    # Layer norms of rows of 32 numbers in float32.
    np.testing.assert_allclose(ENGINES["pieces-512"].load(job)(), wanted.numpy(), atol=1e-5)


def test_an_engine_that_fails_says_so_in_one_line(tmp_path):
    pytest.importorskip("onnxruntime")
    np.save(tmp_path / TOKENS, np.zeros((1, 8), dtype=np.int64))
    with engine_process("onnxruntime", EngineJob(tmp_path, tmp_path, 1)) as process:
        process.wait()
        assert "plain.onnx" in process.fault
        assert "\n" not in process.fault
        assert process.call() is None


@pytest.mark.long
def test_every_engine_has_rows_and_one_that_is_not_there_a_note(tmp_path, tiny_bert, monkeypatch):
    monkeypatch.setattr(engine_kinds, "find_spec", lambda name: None)
    options = EnginesOptions(
        tiny_bert, tmp_path / "rows.csv", lengths=(LONG,), turns=2, engines=("near_far", "nystrom-64", "openvino")
    )
    rows = run_engines(options)
    assert str(read_rows(options.to)) == str(rows)
    found = {(row.method, row.quantity): row for row in rows}
    assert {name for name, _ in found} == {EXACT, "near_far", "nystrom-64", "openvino"}
    # A landmark for each token, and blocks that hold all tokens.
    assert found["nystrom-64", ERROR].value < 1e-5
    assert found["near_far", ERROR].value < 1e-5
    assert found["near_far", TIME].value > 0
    assert found["near_far", MEMORY].value > 0
    assert found[EXACT, BESIDE_TORCH].value == 1
    assert "openvino not installed" in found["openvino", TIME].note


def measured():
    exact, slow, fast = (ENGINES[name] for name in (EXACT, "openvino", "near_far"))
    return {
        EXACT: Measured(exact, error=0.0, seconds=[4.0, 5.0, 4.0], beyond=80.0, whole=500.0),
        "openvino": Measured(slow._replace(packages=()), error=1e-6, seconds=[2.0, 2.5, 2.0], beyond=30.0, whole=400.0),
        "ctranslate2": Measured(ENGINES["ctranslate2"], fault="not installed"),
        "near_far": Measured(fast, error=0.15, seconds=[1.0], beyond=50.0, whole=500.0),
    }


BLANK = Row(
    study="engines", quantity="", method="", value=0.0, n=LONG, facts={"model": "tiny", "threads": 1}, commit="abc"
)


def test_times_stand_beside_torch_and_the_fastest_exact_engine_of_the_same_turns():
    found = {(row.method, row.quantity): row for row in rows_of(measured(), BLANK)}
    assert found["openvino", TIME].value == 2
    assert found["openvino", BESIDE_TORCH].value == 0.5
    assert found[EXACT, BESIDE_BEST].value == 2
    # The time of the first turn, the only one that it took.
    assert (found["near_far", BESIDE_BEST].value, found["near_far", BESIDE_BEST].repeats) == (0.5, 1)
    assert [name for name, quantity in found if name == "ctranslate2"] == ["ctranslate2"]
    assert math.isnan(found["ctranslate2", TIME].value)
    assert found["ctranslate2", TIME].note == "not installed"


def test_the_table_has_a_line_for_each_engine_and_says_why_one_is_empty():
    table = engines_table(rows_of(measured(), BLANK))
    assert table.heads == ["engine", "48 tokens, s", "error, 48", "MB, 48"]
    assert table.lines == [
        [EXACT, "4 (0.5×)", "0", "80"],
        ["openvino", "2 (1×)", "1e-06", "30"],
        ["ctranslate2", "–", "–", "–"],
        ["near_far", "1 (2×)", "0.15", "50"],
    ]
    assert "ctranslate2 at 48 tokens: not installed." in table.notes
    rows = rows_of(measured(), BLANK)
    with pytest.raises(ValueError, match="measured twice"):
        engines_table([*rows, replace(rows[0], value=1.0)])
    with pytest.raises(ValueError, match="rows of 'engines'"):
        engines_table([replace(rows[0], study="model")])
