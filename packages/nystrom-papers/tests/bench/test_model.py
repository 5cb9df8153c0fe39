import functools

import pytest
import torch
from transformers import BertConfig, DistilBertConfig, GPT2Config

from nystrom.models import EncoderConfig
from nystrom.models.configuration import POSITION_OFFSET
from nystrom_lab.cli.main import main
from nystrom_lab.measure.rows import read_rows
from nystrom_papers.bench.inputs import Sizes, make_inputs
from nystrom_papers.bench.model import EncoderSizes, ModelOptions, encoder_finder, find_sizes, run_model

TINY = EncoderSizes(layers=2, width=8, heads=2, intermediate=12, vocabulary=20)
SMALL = {"lengths": (16, 32), "methods": ("softmax", "nystrom-4"), "repeats": 3, "kernel_size": 3}
SMALL |= {"layers": 1, "width": 8, "heads": 2, "intermediate": 12}


def test_rows_hold_each_method_pass_quantity_and_length(tmp_path):
    rows = run_model(ModelOptions(**SMALL, seed=3, batch=2, to=tmp_path))
    assert {(row.n, row.method) for row in rows} == {
        (n, name) for n in (16, 32) for name in ("softmax", "nystrom-4+skip")
    }
    assert len(rows) == 2 * 2 * 2 * 2
    assert read_rows(tmp_path / "model.csv") == rows
    threads = torch.get_num_threads()
    for row in rows:
        timed = row.quantity.endswith("time")
        assert (row.study, row.seed, row.note, row.repeats) == ("model", 3, "", 3 if timed else 1)
        assert row.low <= row.value <= row.high if timed else row.value > 0
        sizes = "b=2 layers=1 width=8 heads=2 intermediate=12 vocabulary=30522 kernel=3"
        assert row.words == f"{sizes} threads={threads} allocator=default"
        assert row.m == (None if row.method == "softmax" else 4)
    # Finished rows are not measured again: other values would come.
    assert run_model(ModelOptions(**SMALL, seed=3, batch=2, to=tmp_path)) == rows
    with pytest.raises(ValueError, match=r"model\.csv holds rows of another setting"):
        run_model(ModelOptions(**SMALL | {"layers": 2}, seed=3, batch=2, to=tmp_path))


# Linformer and Reformer have options that follow from the length.
@pytest.mark.parametrize("name", ["softmax", "nystrom-4", "linformer-4", "reformer-1", "skyformer-4"])
@pytest.mark.parametrize("skip", [False, True])
def test_what_is_measured_is_the_whole_encoder(name, skip):
    sizes = Sizes(3, 2, 4, 3, torch.float64, torch.device("cpu"), "tokens")
    inputs = make_inputs(16, sizes, 0)
    contender, number = encoder_finder(TINY, seed=0)(name)
    call = contender.build(inputs, number, skip)
    out = call.forward()
    assert out.shape == inputs.grad.shape == (3, 16, 8)
    assert out.dtype == torch.float64
    out.backward(inputs.grad)
    assert all(leaf.grad is not None for leaf in call.leaves)
    # Words, positions, segments and their norm; per layer four projections, two of the feed-forward block, two norms.
    embedded = (20 + POSITION_OFFSET + 16 + 2) * 8 + 2 * 8
    layer = 4 * (8 * 8 + 8) + (8 * 12 + 12) + (12 * 8 + 8) + 2 * 2 * 8
    convolution = 2 * 3 if skip else 0
    extra = {"linformer-4": 2 * 4 * 16}.get(name, 0)
    assert sum(leaf.numel() for leaf in call.leaves) == embedded + 2 * (layer + convolution + extra)
    # The same seed draws the same weights and tokens.
    assert torch.equal(contender.build(inputs, number, skip).forward(), out)


def test_each_launch_of_a_model_has_rows_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    asked = SMALL | {"lengths": (16,), "repeats": 1, "launches": ("compiled", "eager")}
    rows = run_model(ModelOptions(**asked, to=tmp_path))
    names = ("softmax", "softmax, compiled", "nystrom-4+skip", "nystrom-4+skip, compiled")
    assert list(dict.fromkeys(row.method for row in rows)) == [*names]
    assert {(row.note, row.m) for row in rows if row.method == names[3]} == {("", 4)}
    assert "--launches compiled eager" in rows[0].command
    assert run_model(ModelOptions(**asked, to=tmp_path)) == rows


@pytest.mark.long
def test_more_methods_are_compiled_than_a_function_may_have_graphs(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    methods = tuple(f"nystrom-{m}" for m in range(1, torch._dynamo.config.recompile_limit // 2 + 2))
    rows = run_model(
        ModelOptions(
            **SMALL | {"lengths": (16,), "methods": methods, "repeats": 1}, launches=("compiled",), to=tmp_path
        )
    )
    assert {row.note for row in rows} == {""}


def test_the_sizes_are_those_of_bert_base_unless_others_are_named():
    base, bert = find_sizes(None), BertConfig()
    assert (base.layers, base.width, base.heads) == (bert.num_hidden_layers, bert.hidden_size, bert.num_attention_heads)
    assert (base.intermediate, base.vocabulary) == (bert.intermediate_size, bert.vocab_size)
    assert find_sizes(None, layers=2, heads=None) == EncoderSizes(layers=2)


@pytest.mark.parametrize(
    "config",
    [
        BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12),
        DistilBertConfig(vocab_size=20, dim=8, n_layers=2, n_heads=2, hidden_dim=12),
        EncoderConfig(vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12),
    ],
)
def test_a_model_gives_its_sizes_by_its_configuration_alone(tmp_path, config):
    config.save_pretrained(tmp_path)
    assert find_sizes(tmp_path) == TINY
    assert find_sizes(tmp_path, layers=5) == EncoderSizes(5, 8, 2, 12, 20)


def test_rows_name_a_model_without_its_place(tmp_path):
    DistilBertConfig(vocab_size=20, dim=8, n_layers=1, n_heads=2, hidden_dim=12).save_pretrained(tmp_path / "mini")
    asked = {"lengths": (16,), "methods": ("softmax",), "passes": ("forward",), "repeats": 1}
    (row, _) = run_model(ModelOptions(**asked, model=tmp_path / "mini", to=tmp_path / "run"))
    words = "--repeats 1 --methods softmax --model mini --passes forward --lengths 16"
    assert row.command == f"nystrom bench model {words}"
    assert " layers=1 width=8 heads=2 intermediate=12 vocabulary=20 " in row.words


def test_folders_without_the_sizes_of_an_encoder_raise(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        find_sizes(tmp_path)
    GPT2Config(n_embd=8, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no intermediate_size or hidden_dim: name an encoder such as BERT"):
        find_sizes(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(ValueError, match="is of type 'unheard-of', which transformers does not know"):
        find_sizes(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("nystrom",)}, "method 'nystrom' lacks its number of landmarks"),
        ({"methods": ("transformers-4",)}, "method 'transformers-4' is not a method of this library"),
        ({"methods": ("near_far-growing-choice",)}, "method 'near_far-growing-choice' is not a method of this"),
        ({"launches": ("graph",)}, "launches holds 'graph', a CUDA graph, but device is 'cpu'"),
        ({"layers": 0}, "layers is 0"),
        ({"heads": 3}, "width is 8 but heads is 3"),
    ],
)
def test_what_cannot_be_measured_raises_before_any_measurement(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        run_model(ModelOptions(**SMALL | change, to=tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.long
def test_the_command_prints_a_table_of_eighty_columns_that_can_be_printed_again(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    words = "--layers 1 --width 8 --heads 2 --intermediate 12 --methods softmax nystrom-4 --repeats 1"
    lengths = "--lengths 16 32 64 128 256"
    assert main(["bench", "model", *words.split(), *lengths.split(), "--to", str(tmp_path)]) == 0
    table, _, places = capsys.readouterr().out.partition("Rows: ")
    assert places.split("\n")[0] == str(tmp_path / "model.csv")
    assert (tmp_path / "model.png").is_file()
    assert max(map(len, table.splitlines())) <= 80
    for part in ("n = 256", "nystrom-4+skip", "forward+backward memory (MB)", "in brackets how"):
        assert part in table
    assert main(["report", "model", str(tmp_path / "model.csv")]) == 0
    assert capsys.readouterr().out == table
