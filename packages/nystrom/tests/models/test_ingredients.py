"""Each ingredient of the encoder changes it as its equation says; padding and neighbours change nothing."""

from contextlib import nullcontext

import pytest
import torch
from torch.testing import assert_close

from nystrom.attention.method_names import NO_ATTENTION
from nystrom.attention.registry import METHODS
from nystrom.models import EncoderConfig, EncoderForSequenceClassification, EncoderModel
from nystrom.models.blocks import EncoderIntermediate, EncoderSelfAttention
from nystrom.models.heads.sequences import pool

# So few landmarks that a sequence of a dozen tokens takes the method's own path.
SMALL = {
    "nystrom": {"num_landmarks": 5},
    "near_far": {"block_size": 4, "reach": 1, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0},
    "skyformer": {"num_landmarks": 6},
    "skyformer_softmax": {"num_landmarks": 6},
    "performer": {"num_features": 6},
    "linformer": {"num_features": 5, "max_length": 60},
    "informer": {"num_queries": 5, "num_samples": 7},
    "reformer": {"num_hashes": 2, "chunk_size": 4, "num_buckets": 4},
    "longformer": {"window": 5},
    "bigbird": {"block_size": 2, "num_random_blocks": 1},
}
INGREDIENTS = {
    "rotary": {"positions": "rotary"},
    "rotary across heads": {"positions": "rotary", "rotary_share": 0.5, "rotary_across_heads": True},
    "no positions": {"positions": "none"},
    "short convolution": {"short_conv_kernel_size": 3},
    "max": {"pooling": "max"},
    "pooled norm": {"pooled_norm": "batch"},
    "gated": {"feed_forward": "gated", "hidden_act": "silu"},
    "glu": {"feed_forward": "glu"},
    "no attention": {"attention": NO_ATTENTION, "attention_options": {}, "short_conv_kernel_size": 3},
}
ALL = {"norm": "pre", "positions": "rotary", "rotary_share": 0.5, "rotary_across_heads": True}
ALL |= {"short_conv_kernel_size": 3, "feed_forward": "gated", "pooling": "max", "pooled_norm": "batch"}
# float64 rounding through an inverse whose condition is a few thousand.
CLOSE = {"rtol": 1e-8, "atol": 1e-9}
every_ingredient = pytest.mark.parametrize("changes", INGREDIENTS.values(), ids=INGREDIENTS)


def make_config(attention="nystrom", **changes):
    sizes = {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3}
    sizes |= {"intermediate_size": 12, "max_position_embeddings": 40, "initializer_range": 0.3, "conv_kernel_size": 5}
    sizes |= {"attention": attention, "attention_options": SMALL.get(attention, {})}
    return EncoderConfig(**(sizes | changes))


def make(attention="nystrom", kind=EncoderForSequenceClassification, **changes):
    torch.manual_seed(0)
    return kind(make_config(attention, **changes)).double().eval()


def draw_tokens(b, n, seed=1):
    return torch.randint(0, 17, (b, n), generator=torch.Generator().manual_seed(seed))


def check_laws(model):
    ids = draw_tokens(3, 14)
    mask = torch.ones_like(ids)
    mask[0, 9:], mask[1, :4], mask[2, 2:] = 0, 0, 0
    together = model(ids, attention_mask=mask).logits
    for row in range(3):
        alone = model(ids[row : row + 1, mask[row].bool()]).logits
        assert_close(together[row : row + 1], alone, **CLOSE)
        wide, around = torch.full((1, 25), 16), torch.zeros(1, 25, dtype=torch.long)
        wide[:, 6:20], around[:, 6:20] = ids[row], mask[row]
        assert_close(model(wide, attention_mask=around).logits, alone, **CLOSE)


@every_ingredient
def test_padding_and_neighbours_change_nothing(changes):
    check_laws(make(**changes))


@pytest.mark.parametrize("attention", [*METHODS, NO_ATTENTION])
def test_padding_and_neighbours_change_nothing_with_all_of_them(attention):
    changes = ALL if attention != NO_ATTENTION else ALL | INGREDIENTS["no positions"]
    if attention == NO_ATTENTION:
        changes |= {"rotary_share": 1.0, "rotary_across_heads": False}
    check_laws(make(attention, **changes))


@pytest.mark.parametrize("changes", [ALL, INGREDIENTS["no attention"]], ids=["all", "no attention"])
def test_what_a_masked_token_holds_reaches_neither_logits_nor_gradients(changes):
    model, mask = make(**changes), torch.ones(2, 11, dtype=torch.bool)
    mask[0, 8:], mask[1, :3] = False, False
    words = torch.randn(2, 11, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    results = []
    for filler in (0.0, torch.nan):
        model.zero_grad()
        logits = model(inputs_embeds=torch.where(mask[..., None], words, filler), attention_mask=mask).logits
        logits.square().sum().backward()
        results.append((logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    assert_close(results[0], results[1], rtol=0, atol=0)


@every_ingredient
def test_every_weight_is_trained(changes):
    model = make(**changes)
    model(draw_tokens(2, 12), labels=torch.tensor([0, 2])).loss.backward()
    assert not [name for name, weight in model.named_parameters() if weight.grad is None]


@every_ingredient
def test_the_default_device_of_torch_changes_nothing_in_a_step(changes):
    # So many taps that their gradient is a sum of diagonals
    changes = changes | {"short_conv_kernel_size": 15} if "short_conv_kernel_size" in changes else changes
    model, ids, results = make(**changes, hidden_dropout_prob=0.2).float().train(), draw_tokens(3, 20), []
    mask, labels = torch.arange(20) < torch.tensor([[20], [12], [15]]), torch.tensor([0, 2, 1])
    for context in (nullcontext(), torch.device("meta")):
        model.zero_grad()
        torch.manual_seed(2)
        with context:
            output = model(ids, attention_mask=mask, labels=labels)
            output.loss.backward()
        results.append([output.logits, *(weight.grad for weight in model.parameters())])
    assert_close(results[0], results[1], rtol=0, atol=0)


@every_ingredient
def test_a_saved_model_comes_back_with_the_same_logits(changes, tmp_path):
    model, ids = make(**changes).float(), draw_tokens(2, 12)
    model.save_pretrained(tmp_path)
    loaded = EncoderForSequenceClassification.from_pretrained(tmp_path)
    assert {name: getattr(loaded.config, name) for name in changes} == changes
    assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("changes", [ALL, INGREDIENTS["no attention"]], ids=["all", "no attention"])
def test_compile_makes_one_graph(changes):
    torch._dynamo.reset()
    model, ids = make(**changes), draw_tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits, **CLOSE)


@pytest.mark.parametrize("positions", ["rotary", "none"])
def test_without_a_table_any_length_is_taken(positions):
    model = make(positions=positions)
    assert model.config.longest_input is None
    assert model.nystromformer.embeddings.position_embeddings is None
    assert model(draw_tokens(1, 55)).logits.isfinite().all()
    with pytest.raises(ValueError, match="55 tokens, padding included, and the model has 40 positions"):
        make()(draw_tokens(1, 55))


def test_rotary_positions_count_from_the_first_real_token_and_can_be_given():
    # Features of the scores, so that an angle that all tokens share would change them.
    model, ids = make("performer", positions="rotary"), draw_tokens(1, 9)
    rows = torch.arange(2, 11)[None]
    assert_close(model(ids, position_ids=rows).logits, model(ids).logits, rtol=0, atol=0)
    assert not torch.allclose(model(ids, position_ids=rows + 3).logits, model(ids).logits)
    with pytest.raises(ValueError, match="position_ids is a tensor, but positions is 'none'"):
        make(positions="none")(ids, position_ids=rows)


def test_without_positions_attention_sees_a_set():
    model, ids = make("softmax", positions="none", conv_kernel_size=None), draw_tokens(1, 9)
    assert_close(model(ids.flip(1)).logits, model(ids).logits, **CLOSE)
    turned = make("softmax", positions="rotary", conv_kernel_size=None)
    assert not torch.allclose(turned(ids.flip(1)).logits, turned(ids).logits)


def test_queries_and_keys_are_turned_before_the_method_takes_them():
    attention = make(kind=EncoderModel, positions="rotary", short_conv_kernel_size=3).encoder.layer[0].attention.self
    model = make(kind=EncoderModel, positions="rotary", short_conv_kernel_size=3)
    attention, seen = model.encoder.layer[0].attention.self, {}
    attention.method.register_forward_pre_hook(lambda _, given: seen.update(q=given[0], k=given[1], v=given[2]))
    attention.register_forward_pre_hook(lambda _, given: seen.update(x=given[0]))
    model(draw_tokens(2, 12))
    angles = torch.arange(12, dtype=torch.float64)[:, None] * 10_000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    for name in ("query", "key", "value"):
        x = getattr(attention, name)(seen["x"])
        x = torch.conv1d(x.mT, getattr(attention, f"{name}_conv").weight, padding=1, groups=16).mT
        z = torch.complex(*x.view(2, 12, 2, 2, 4).unbind(3))
        z = z if name == "value" else z * torch.exp(1j * angles[:, None])
        wanted = torch.cat([z.real, z.imag], dim=-1).transpose(1, 2)
        assert_close(seen[name[0]], wanted, **CLOSE)


@pytest.mark.parametrize(
    ("kind", "act", "gate"),
    [
        ("gated", "gelu", torch.nn.functional.gelu),
        ("gated", "silu", torch.nn.functional.silu),
        ("glu", "gelu", torch.sigmoid),
    ],
)
def test_gates_are_those_of_their_equation(kind, act, gate):
    block = EncoderIntermediate(make_config(feed_forward=kind, hidden_act=act)).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    w, b, g, c = block.dense.weight, block.dense.bias, block.gate.weight, block.gate.bias
    assert w.shape == g.shape == (12, 16)
    assert_close(block(x), gate(x @ g.mT + c) * (x @ w.mT + b), **CLOSE)


def test_max_pooling_takes_the_largest_real_value_and_zero_where_there_is_none():
    x, keep = torch.randn(3, 6, 4), torch.tensor([[1, 1, 0, 0, 0, 0], [0, 1, 0, 1, 1, 0], [0] * 6]).bool()
    x[0, 4], x[1, 0] = torch.inf, torch.nan
    x.requires_grad_()
    pooled = pool(x, keep, how="max")
    assert_close(pooled, torch.stack([x[0, :2].amax(0), x[1, [1, 3, 4]].amax(0), torch.zeros(4)]), rtol=0, atol=0)
    pooled.sum().backward()
    assert torch.equal(x.grad.sum(1), torch.tensor([[1.0] * 4, [1.0] * 4, [0.0] * 4]))
    assert_close(pool(x[2:], None, how="max"), x[2:].amax(1), rtol=0, atol=0)


@pytest.mark.parametrize("taps", [None, 5])
def test_without_attention_the_values_pass_through(taps):
    config = make_config(NO_ATTENTION, conv_kernel_size=taps)
    block, x = EncoderSelfAttention(config, 0).double(), torch.randn(2, 9, 16, dtype=torch.float64)
    v = block.value(x)
    if taps is not None:
        lines = v.view(2, 9, 2, 8).permute(0, 2, 1, 3)
        v = v + torch.conv2d(lines, block.conv.weight, padding=(2, 0), groups=2).permute(0, 2, 1, 3).flatten(2)
    assert_close(block(x, None), v, **CLOSE)
    assert not any(name.startswith(("query", "key")) for name in block.state_dict())


def test_attention_cannot_be_set_where_there_is_none():
    for before, after in ((NO_ATTENTION, "softmax"), ("softmax", NO_ATTENTION)):
        with pytest.raises(ValueError, match="has neither queries nor keys"):
            make(before, kind=EncoderModel).set_attention(after, {})


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"positions": "sinusoidal"}, "positions is 'sinusoidal'; expected one of 'learned', 'rotary', 'none'"),
        ({"positions": "rotary", "rotary_share": 0}, r"rotary_share is 0; expected a number in \(0, 1\]"),
        ({"positions": "rotary", "rotary_share": 1.5}, "rotary_share is 1.5"),
        ({"positions": "rotary", "rotary_across_heads": 1}, "rotary_across_heads is 1"),
        ({"rotary_share": 0.5}, "rotary_share is 0.5 but positions is 'learned'"),
        ({"rotary_across_heads": True}, "rotary_across_heads is True but positions is 'learned'"),
        ({"positions": "rotary", "hidden_size": 18}, "a head has 9 channels; expected an even number"),
        ({"positions": "rotary", "attention": NO_ATTENTION, "attention_options": {}}, "no queries and keys to rotate"),
        ({"short_conv_kernel_size": 4}, "short_conv_kernel_size is 4; expected an odd number"),
        ({"short_conv_kernel_size": 0}, "short_conv_kernel_size is 0"),
        ({"feed_forward": "swiglu"}, "feed_forward is 'swiglu'; expected one of 'plain', 'gated', 'glu'"),
        (
            {"attention": NO_ATTENTION, "attention_options": {"num_landmarks": 5}},
            r"attention_options is \{'num_landmarks': 5\}, but attention is 'none'",
        ),
        (
            {"attention": NO_ATTENTION, "attention_options": {}, "share_attention_weights": True},
            "share_attention_weights is True, but attention is 'none'",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_name(wrong, says):
    with pytest.raises(ValueError, match=says):
        make_config(**wrong)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"positions": "rotary"}, "positions is 'rotary', not 'learned'"),
        ({"short_conv_kernel_size": 3}, "short_conv_kernel_size is 3, not None"),
        ({"feed_forward": "glu"}, "feed_forward is 'glu', not 'plain'"),
        ({"attention": NO_ATTENTION}, "attention is 'none'"),
    ],
)
def test_the_published_format_refuses_what_it_cannot_say(changes, says):
    published = {"attention": "softmax", "attention_options": {}, "pooling": "first", "segment_means_seq_len": 40}
    make_config(**published)
    with pytest.raises(ValueError, match=f"segment_means_seq_len is 40.*{says}"):
        make_config(**(published | changes))
