"""T5 and its kin by near_far: equal in the exact limit, and without transformers' n x n bias."""

import inspect

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LongT5Config, LongT5EncoderModel, T5Config, T5EncoderModel, T5Model
from transformers.models.t5.modeling_t5 import T5Attention

from nystrom import RelativeBuckets, monitor_errors
from nystrom.integrations import check_attention, set_attention
from nystrom.integrations.first_checks import asking_layers
from nystrom.integrations.layer_calls import intercepted

SIZES = {"d_model": 16, "num_layers": 2, "num_heads": 2, "d_ff": 24, "d_kv": 8, "vocab_size": 64, "dropout_rate": 0.0}
N = 70


def make(method, **options):
    torch.manual_seed(0)
    model = T5EncoderModel._from_config(T5Config(**SIZES), attn_implementation=method, attention_options=options)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(std=0.15)
    return model.eval().double()


def texts():
    ids = torch.randint(1, 60, (2, N), generator=torch.Generator().manual_seed(1))
    return ids, torch.arange(N) < torch.tensor([[N], [48]])


@pytest.mark.parametrize("side", ["right", "left"])
def test_an_encoder_is_its_exact_self_in_the_exact_limit(side):
    (ids, keep), exact, ours = texts(), make("sdpa"), make("near_far")
    keep = keep if side == "right" else keep.flip(1)
    expected, found = (model(input_ids=ids, attention_mask=keep.long())[0] for model in (exact, ours))
    assert_close(found[keep], expected[keep], rtol=1e-10, atol=1e-10)
    alone = ours(input_ids=ids[1:][:, keep[1]])[0]
    assert_close(found[1][keep[1]], alone[0], rtol=1e-10, atol=1e-10)
    grads = []
    for out, model in ((expected, exact), (found, ours)):
        out[keep].square().sum().backward()
        grads.append(model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad)
    assert_close(grads[1], grads[0], rtol=1e-8, atol=1e-9)


class Largest(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().size():
                self.numel = max(self.numel, x.untyped_storage().size() // x.element_size())
        return out


def test_the_bias_of_all_pairs_is_never_made():
    sizes = {"block_size": 8, "reach": 2, "num_heavy": 4, "num_clusters": 4, "exact_up_to": 0}
    n, seen = 400, {}
    for method, options in (("near_far", sizes), ("sdpa", {})):
        with Largest() as largest, torch.no_grad():
            make(method, **options)(input_ids=torch.ones(1, n, dtype=torch.long))
        seen[method] = largest.numel
    assert seen["near_far"] < n * n <= seen["sdpa"]


def test_a_decoder_stays_exact():
    torch.manual_seed(0)
    exact = T5Model._from_config(T5Config(**SIZES, decoder_start_token_id=0), attn_implementation="sdpa").eval()
    ours = T5Model._from_config(T5Config(**SIZES, decoder_start_token_id=0), attn_implementation="near_far").eval()
    ours.load_state_dict(exact.state_dict())
    ids, keep = texts()
    named = {"input_ids": ids, "attention_mask": keep.long(), "decoder_input_ids": ids[:, :9]}
    assert_close(ours(**named)[0], exact(**named)[0], rtol=1e-4, atol=1e-5)
    assert len(check_attention(ours, named).exact) == 4


SMALL = {"block_size": 8, "reach": 2, "num_heavy": 4, "num_clusters": 4, "exact_up_to": 0}


def test_an_encoder_that_was_exact_is_set(monkeypatch):
    # Undo the patch of the class: no model of it was made with a method yet.
    monkeypatch.setattr(T5Attention, "compute_bias", inspect.unwrap(T5Attention.compute_bias))
    (ids, keep), model = texts(), make("sdpa")
    named = {"input_ids": ids, "attention_mask": keep.long()}
    exact = model(**named)[0]
    set_attention(model, "near_far")
    assert_close(model(**named)[0][keep], exact[keep], rtol=1e-10, atol=1e-10)
    set_attention(model, "sdpa")
    assert_close(model(**named)[0], exact)


@pytest.mark.parametrize("layer", [0, 1])
def test_layers_that_are_exact_stand_beside_others(layer):
    (ids, keep), model = texts(), make("near_far", **SMALL, exact_layers=(layer,))
    named = {"input_ids": ids, "attention_mask": keep.long()}
    assert len(check_attention(model, named).exact) == 1
    far = (model(**named)[0] - make("sdpa")(**named)[0])[keep].abs().max()
    both = (make("near_far", **SMALL)(**named)[0] - make("sdpa")(**named)[0])[keep].abs().max()
    assert 0 < far != both


@pytest.mark.parametrize("exact_layers", [(), (0,), (0, 1)])
def test_packed_sequences_have_the_positions_of_each_in_exact_layers_too(exact_layers):
    ids, ends = texts()[0][:1], torch.tensor([0, 30, N])
    model = make("near_far", **SMALL | {"reach": N}, exact_layers=exact_layers)
    packed = model(input_ids=ids, cu_seq_lens_q=ends, cu_seq_lens_k=ends)[0]
    alone = [make("sdpa")(input_ids=part)[0] for part in (ids[:, :30], ids[:, 30:])]
    assert_close(packed, torch.cat(alone, dim=1), rtol=1e-10, atol=1e-10)


@pytest.mark.refuses
def test_a_packed_text_in_a_decoder_is_refused():
    model = T5Model._from_config(T5Config(**SIZES), attn_implementation="near_far").eval()
    ids, ends = texts()[0][:1], torch.tensor([0, 30, N])
    with pytest.raises(ValueError, match=r"T5Attention passes position_bias \(relative positions\)"):
        model.decoder(input_ids=ids, cu_seq_lens_q=ends, cu_seq_lens_k=ends, use_cache=False)


@pytest.mark.long
def test_kernels_compute_an_encoder_that_asks_for_them(monkeypatch):
    pytest.importorskip("triton")
    from nystrom.gpu.near_far import near_far_positions

    device, found, calls = "cuda" if torch.cuda.is_available() else "cpu", [], []
    kernels = near_far_positions.near_far_with_positions
    counted = lambda *inputs, **sizes: calls.append(sizes) or kernels(*inputs, **sizes)  # noqa: E731
    monkeypatch.setattr(near_far_positions, "near_far_with_positions", counted)
    ids = torch.randint(1, 60, (2, 21), generator=torch.Generator().manual_seed(1)).to(device)
    keep = torch.arange(21, device=device) >= torch.tensor([[0], [7]], device=device)
    for backend in ("torch", "triton"):
        model = make("near_far", **SMALL, backend=backend).to(device)
        out = model(input_ids=ids, attention_mask=keep.long())[0][keep]
        # One for each layer.
        assert len(calls) == (2 if backend == "triton" else 0)
        out.square().sum().backward()
        table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad
        found.append((out, table))
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_an_encoder_change_no_gradient(reentrant):
    (ids, keep), grads = texts(), []
    for checkpoints in (False, True):
        model = make("near_far", **SMALL).train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        embedded = model.shared(ids).detach().requires_grad_()
        model(inputs_embeds=embedded, attention_mask=keep.long())[0][keep].square().sum().backward()
        grads.append([embedded.grad, *(x.grad for name, x in model.named_parameters() if "shared" not in name)])
    for ours, theirs in zip(*grads, strict=True):
        assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.refuses
@pytest.mark.parametrize("part", ["encoder.block.1", "encoder.block.0.layer.0.SelfAttention"])
def test_a_single_exact_layer_is_refused_with_the_way_out(part):
    model = make("near_far")
    with pytest.raises(ValueError, match=r"hand their relative positions to: .* exact_layers"):
        set_attention(model.get_submodule(part), "sdpa")
    assert {layer.config._attn_implementation for layer in asking_layers(model)} == {"near_far"}


@pytest.mark.refuses
def test_an_inspection_is_refused_with_the_way_out():
    model = make("sdpa")
    with pytest.raises(ValueError, match=r"adds relative positions .* compare its states"), intercepted(model, None):
        model(input_ids=texts()[0])


def test_a_bias_follows_to_the_device_of_the_next_layer():
    layer, ids = make("near_far").encoder.block[1].layer[0].SelfAttention, texts()[0]
    handed = RelativeBuckets(torch.zeros(2, 32))
    # A model over several devices: the first layer made its bias on another.
    out = layer.to("meta")(torch.zeros(*ids.shape, 16, device="meta", dtype=torch.double), position_bias=handed)[0]
    assert out.device.type == "meta"


def test_the_monitor_leaves_relative_positions_out():
    model = make("near_far", **SMALL)
    with monitor_errors(model) as errors, torch.no_grad():
        model(input_ids=texts()[0])
    assert not errors.rows
    assert set(errors.left.values()) == {"a bias of positions"}


@pytest.mark.refuses
def test_encoders_with_local_attention_of_their_own_are_refused():
    config = LongT5Config(**SIZES, local_radius=4, encoder_attention_type="local")
    with pytest.raises(ValueError, match="LongT5Stack has attention of its own"):
        LongT5EncoderModel._from_config(config, attn_implementation="near_far")


@pytest.mark.refuses
def test_other_methods_refuse_by_name():
    model = make("sdpa")
    for call in (lambda: set_attention(model, "nystrom"), lambda: model.set_attn_implementation("skyformer")):
        with pytest.raises(ValueError, match="T5Attention passes position_bias"):
            call()
