"""An exported file gives the model's results, at other batches and lengths than it was made from."""

import pytest
import torch
from torch.testing import assert_close

from nystrom.attention.plan import PLAN, AttentionPlan, LayerChoice
from nystrom.attention.registry import METHODS
from nystrom.models import (
    EncoderConfig,
    EncoderForMaskedLM,
    EncoderForMultipleChoice,
    EncoderForPairClassification,
    EncoderForPreTraining,
    EncoderForQuestionAnswering,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
    EncoderModel,
)
from nystrom.models.export.onnx_program import export_onnx, export_program

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

# So few landmarks that most lengths take the method's own path.
SMALL = {
    "nystrom": {"num_landmarks": 5},
    "near_far": {"block_size": 4, "reach": 1, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0},
    "skyformer": {"num_landmarks": 6},
    "skyformer_softmax": {"num_landmarks": 6},
    "performer": {"num_features": 6},
    "linformer": {"num_features": 5, "max_length": 40},
    "informer": {"num_queries": 5, "num_samples": 7},
    "reformer": {"num_hashes": 2, "chunk_size": 4, "num_buckets": 4},
    "longformer": {"window": 5},
    "bigbird": {"block_size": 2, "num_random_blocks": 1},
}
HEADS = {
    EncoderModel: ("last_hidden_state",),
    EncoderForMaskedLM: ("logits",),
    EncoderForPreTraining: ("prediction_logits", "sop_logits"),
    EncoderForSequenceClassification: ("logits",),
    EncoderForTokenClassification: ("logits",),
    EncoderForQuestionAnswering: ("start_logits", "end_logits"),
    EncoderForMultipleChoice: ("logits",),
    EncoderForPairClassification: ("logits",),
}
# float32 rounding through a layer or two and an inverse.
CLOSE = {"rtol": 0, "atol": 2e-5}
# Around the landmarks, the lengths that the file was made with, and the longest; (sequences, tokens, padding).
SHAPES = ((1, 1, 0), (1, 2, 1), (2, 5, 2), (3, 6, 0), (1, 7, 1), (4, 16, 14), (3, 33, 20), (5, 40, 3))


def make(attention="nystrom", kind=EncoderModel, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 17, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3}
    sizes |= {"intermediate_size": 16, "max_position_embeddings": 40, "initializer_range": 0.3}
    options = {"attention": attention, "attention_options": SMALL.get(attention, {})}
    return kind(EncoderConfig(**(sizes | options | changes))).eval()


def draw_batch(b, n, pad, *, choices=()):
    """Padding on the left of the first sequence and on the right of the last."""
    ids = torch.randint(0, 17, (b, *choices, n), generator=torch.Generator().manual_seed(n))
    mask = torch.ones_like(ids)
    mask[-1, ..., n - pad :] = 0
    if b > 1:
        mask[0, ..., : pad // 2] = 0
    return ids, mask


def run(path, **inputs):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(x) for x in session.run(None, {name: x.numpy() for name, x in inputs.items()})]


def assert_same_as_the_model(path, model):
    for b, n, pad in SHAPES:
        ids, mask = draw_batch(b, n, pad)
        with torch.no_grad():
            wanted = model(ids, attention_mask=mask).last_hidden_state
        (came,) = run(path, input_ids=ids, attention_mask=mask)
        assert_close(came, wanted, **CLOSE, msg=lambda text, b=b, n=n: f"{b} x {n}: {text}")


@pytest.mark.parametrize("conv_kernel_size", [5, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.long
def test_onnx_of_nystrom_attention_takes_any_batch_length_and_padding(conv_kernel_size, tmp_path):
    model = make(conv_kernel_size=conv_kernel_size, num_hidden_layers=1)
    done = export_onnx(model, tmp_path / "model.onnx")
    assert_same_as_the_model(tmp_path / "model.onnx", model)
    assert 0 < done.difference < 1e-4
    assert len(done.runs) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of onnxruntime's own
def test_an_exported_classifier_is_made_int8_by_onnxruntime(tmp_path):
    quantization = pytest.importorskip("onnxruntime.quantization")
    model = make(kind=EncoderForSequenceClassification, num_hidden_layers=1, hidden_size=32)
    export_onnx(model, tmp_path / "model.onnx", check=False)
    quantization.quantize_dynamic(tmp_path / "model.onnx", tmp_path / "int8.onnx")
    ids, mask = draw_batch(3, 20, 4)
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits
    (came,) = run(tmp_path / "int8.onnx", input_ids=ids, attention_mask=mask)
    # Weights of 8 bits: a few hundredths of the numbers' size.
    assert_close(came, wanted, rtol=0, atol=0.1 * wanted.abs().max().item())
    assert not torch.equal(came, wanted)
    # docs/export.md: in int8 neighbours change the numbers of a text, and alone it has the same ones always.
    first = {"input_ids": ids[:1], "attention_mask": mask[:1]}
    assert_close(run(tmp_path / "model.onnx", **first)[0], wanted[:1], **CLOSE)
    alone, again = (run(tmp_path / "int8.onnx", **first)[0] for _ in range(2))
    assert (alone - came[:1]).abs().max() > 1e-3 * wanted.abs().max()
    assert torch.equal(alone, again)


@pytest.mark.slow
@pytest.mark.parametrize("attention", [name for name in METHODS if name != "nystrom"])
def test_onnx_of_every_method_takes_any_batch_length_and_padding(attention, tmp_path):
    model = make(attention, conv_kernel_size=5)
    export_onnx(model, tmp_path / "model.onnx", check=False)
    assert_same_as_the_model(tmp_path / "model.onnx", model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "options"),
    [
        ("nystrom", {"num_landmarks": 5, "landmarks": "uniform"}),
        ("nystrom", {"num_landmarks": 5, "landmarks": "kmeans"}),
        ("nystrom", {"num_landmarks": 5, "z0": "authors"}),
        ("skyformer", {"num_landmarks": 6, "kernel": "laplace"}),
    ],
)
def test_onnx_of_other_options(attention, options, tmp_path):
    model = make(attention, attention_options=options)
    export_onnx(model, tmp_path / "model.onnx")
    assert_same_as_the_model(tmp_path / "model.onnx", model)


@pytest.mark.long
@pytest.mark.parametrize(
    "attention",
    [
        name if name in ("nystrom", "near_far", "linformer") else pytest.param(name, marks=pytest.mark.slow)
        for name in METHODS
    ],
)
def test_a_program_takes_any_batch_and_length(attention):
    model = make(attention, conv_kernel_size=5, num_hidden_layers=1)
    program = export_program(model).module()
    for b, n, pad in SHAPES:
        ids, mask = draw_batch(b, n, pad)
        (came,) = program(ids, mask)
        assert_close(came, model(ids, attention_mask=mask).last_hidden_state, **CLOSE)


@pytest.mark.long
@pytest.mark.parametrize("positions", ["rotary", "none"])
def test_a_program_without_a_table_of_positions_takes_inputs_longer_than_one(positions):
    # A number of positions that means nothing here.
    model = make(positions=positions, max_position_embeddings=1, num_hidden_layers=1)
    program = export_program(model).module()
    for b, n, pad in ((1, 1, 0), (2, 60, 7), (1, 600, 0)):
        ids, mask = draw_batch(b, n, pad)
        (came,) = program(ids, mask)
        assert_close(came, model(ids, attention_mask=mask).last_hidden_state, **CLOSE)


@pytest.mark.long
def test_onnx_without_a_table_of_positions_takes_and_is_compared_on_inputs_longer_than_one(tmp_path):
    model = make(positions="rotary", max_position_embeddings=40, num_hidden_layers=1)
    assert (2, 600) in export_onnx(model, tmp_path / "model.onnx").runs
    assert_same_as_the_model(tmp_path / "model.onnx", model)


def test_a_program_can_be_written_and_read(tmp_path):
    model, (ids, mask) = make(kind=EncoderForMaskedLM, num_hidden_layers=1), draw_batch(3, 31, 4)
    torch.export.save(export_program(model), tmp_path / "model.pt2")
    (came,) = torch.export.load(tmp_path / "model.pt2").module()(ids, mask)
    assert_close(came, model(ids, attention_mask=mask).logits, **CLOSE)


@pytest.mark.parametrize(
    ("pinv", "dtype"), [("ridge", torch.float64), ("exact", torch.float64), ("iterative", torch.bfloat16)]
)
@pytest.mark.long
def test_a_program_takes_every_inverse_and_dtype(pinv, dtype):
    model = make(attention_options={"num_landmarks": 5, "pinv": pinv}, num_hidden_layers=1).to(dtype)
    ids, mask = draw_batch(3, 31, 4)
    (came,) = export_program(model).module()(ids, mask)
    # The same operations on the same numbers; in bfloat16 a rounding of numbers around 1.
    tolerance = 1e-10 if dtype == torch.float64 else 2e-2
    assert_close(came, model(ids, attention_mask=mask).last_hidden_state, rtol=0, atol=tolerance)


@pytest.mark.long
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_linformer_is_written_for_the_length_that_it_has(positions):
    options = {"num_features": 5, "max_length": 30}
    model = make("linformer", attention_options=options, num_hidden_layers=1, positions=positions)
    program, (ids, mask) = export_program(model).module(), draw_batch(2, 30, 4)
    (came,) = program(ids, mask)
    assert_close(came, model(ids, attention_mask=mask).last_hidden_state, **CLOSE)


@pytest.mark.parametrize("kind", [EncoderForQuestionAnswering, EncoderForMultipleChoice])
@pytest.mark.long
def test_onnx_names_what_it_takes_and_gives(kind, tmp_path):
    model = make("softmax", kind, num_hidden_layers=1)
    done = export_onnx(model, tmp_path / "model.onnx", token_type_ids=True)
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert done.outputs == tuple(value.name for value in graph.output) == HEADS[kind]
    assert [value.name for value in graph.input] == ["input_ids", "attention_mask", "token_type_ids"]
    axes = ["batch", "length"] if kind is not EncoderForMultipleChoice else ["batch", "choices", "length"]
    for value in graph.input:
        assert [dim.dim_param for dim in value.type.tensor_type.shape.dim] == axes


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.long
def test_a_program_of_every_head_gives_its_outputs(kind):
    model = make("softmax", kind, num_hidden_layers=1)
    choices = {EncoderForMultipleChoice: (4,), EncoderForPairClassification: (2,)}.get(kind, ())
    program, (ids, mask) = export_program(model, token_type_ids=True).module(), draw_batch(3, 31, 4, choices=choices)
    segments = ids % 2
    wanted = model(ids, attention_mask=mask, token_type_ids=segments)
    assert tuple(wanted.keys()) == HEADS[kind]
    assert_close(program(ids, mask, segments), tuple(wanted.values()), **CLOSE)


@pytest.mark.long
def test_a_model_in_training_is_written_as_in_evaluation_and_goes_on_training(tmp_path):
    model = make("softmax", num_hidden_layers=1, hidden_dropout_prob=0.5).train()
    export_onnx(model, tmp_path / "model.onnx")
    assert all(module.training for module in model.modules())
    ids, mask = draw_batch(2, 9, 2)
    (came,) = run(tmp_path / "model.onnx", input_ids=ids, attention_mask=mask)
    assert_close(came, model.eval()(ids, attention_mask=mask).last_hidden_state, **CLOSE)


@pytest.mark.long
def test_a_file_that_differs_from_the_model_is_not_kept(tmp_path, monkeypatch):
    import nystrom.models.export.words as words

    # A word that means something else there.
    monkeypatch.setitem(words.IN_WORDS_OF_ONNX, torch.ops.aten.gelu.default, lambda x, approximate="none": x)
    model = make("softmax", num_hidden_layers=1, hidden_act="gelu")
    with pytest.raises(ArithmeticError, match=r"differs from the model by .* at \(1, 1\), and was not kept"):
        export_onnx(model, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("came", ["model.onnx", "model.onnx.data"])
def test_a_file_that_came_while_the_model_was_traced_stays(came, tmp_path, monkeypatch):
    from nystrom.models.export import onnx_program

    name_axes, save = onnx_program._name_axes, torch.onnx.ONNXProgram.save

    def late(written):
        name_axes(written)
        (tmp_path / came).write_text("mine")

    def with_weights(self, to):
        save(self, to)
        to.with_name(f"{to.name}.data").write_bytes(b"weights")

    monkeypatch.setattr(onnx_program, "_name_axes", late)
    monkeypatch.setattr(torch.onnx.ONNXProgram, "save", with_weights)
    with pytest.raises(ValueError, match=rf"{came} already exists and is not overwritten"):
        export_onnx(make("softmax", num_hidden_layers=1), tmp_path / "model.onnx", check=False)
    assert [path.name for path in tmp_path.iterdir()] == [came]
    assert (tmp_path / came).read_text() == "mine"


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data"])
def test_a_link_to_nothing_is_refused_before_the_model_is_traced(name, tmp_path, monkeypatch):
    (tmp_path / name).symlink_to(tmp_path / "gone")
    monkeypatch.setattr("nystrom.models.export.onnx_program.export_program", None)
    with pytest.raises(ValueError, match=rf"{name} already exists and is not overwritten"):
        export_onnx(make("softmax", num_hidden_layers=1), tmp_path / "model.onnx")
    assert (tmp_path / name).is_symlink()


# The methods of its layers are not in attention_options by name.
IN_A_PLAN = AttentionPlan((LayerChoice("softmax", {}), LayerChoice("nystrom", {"pinv": "exact"})))


@pytest.mark.parametrize(
    ("model", "to", "says"),
    [
        (make().double(), "m.onnx", r"in torch.float64; expected torch.float32: call model.float\(\)"),
        (make(attention_options={"pinv": "ridge"}), "m.onnx", "pinv is 'ridge'.*use 'iterative'"),
        (make(attention_options={"pinv": "exact"}), "m.onnx", "pinv is 'exact'"),
        (make(PLAN, attention_options=IN_A_PLAN.options), "m.onnx", "pinv is 'exact'"),
        (make("near_far", attention_options={"num_selected": 32}), "m.onnx", "num_selected is 32.*use 0"),
        (make("near_far", attention_options={"num_heavy": 0}), "m.onnx", "num_heavy is 0.*use 1 or more"),
        (make(), "m.bin", r"to is .*m.bin; expected a file name that ends in .onnx"),
        (make(), "there.onnx", r"there.onnx already exists and is not overwritten"),
        (make(max_position_embeddings=1), "m.onnx", "longest input of the model is 1"),
        (
            torch.nn.Linear(2, 2),
            "m.onnx",
            r"model is a Linear; expected an encoder of tokens, of nystrom.models or transformers",
        ),
    ],
    ids=[
        "float64",
        "ridge",
        "exact",
        "in a plan",
        "num_selected",
        "num_heavy",
        "suffix",
        "there",
        "one position",
        "not ours",
    ],
)
@pytest.mark.refuses
def test_what_cannot_be_written_is_refused_by_name(model, to, says, tmp_path):
    (tmp_path / "there.onnx").write_text("mine")
    with pytest.raises(ValueError, match=says):
        export_onnx(model, tmp_path / to)
    assert (tmp_path / "there.onnx").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("opset", [17, 23])
def test_an_opset_that_would_not_be_written_as_asked_is_refused(opset, tmp_path):
    with pytest.raises(ValueError, match=rf"opset is {opset}; expected 18 to 22"):
        export_onnx(make(), tmp_path / "model.onnx", opset=opset)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 22])
def test_the_opset_is_the_one_that_was_asked_for(opset, tmp_path):
    model = make(num_hidden_layers=1)
    export_onnx(model, tmp_path / "model.onnx", opset=opset)
    assert [entry.version for entry in onnx.load(tmp_path / "model.onnx").opset_import if not entry.domain] == [opset]
    assert_same_as_the_model(tmp_path / "model.onnx", model)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "nystrom.models.export.onnx_program.find_spec", lambda name: None if name == "onnxruntime" else name
    )
    with pytest.raises(ValueError, match=r"onnxruntime.*pip install 'nystrom\[onnx\]'"):
        export_onnx(make(), tmp_path / "model.onnx")
