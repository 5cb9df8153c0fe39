"""Encoders of transformers under the name of a method; test_families.py covers all families."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close
from transformers import (
    AutoModel,
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    EsmcConfig,
    ModernBertConfig,
    RobertaConfig,
    ViTConfig,
)

from nystrom import near_far_attention, near_far_sizes
from nystrom.attention.plan import AttentionPlan, LayerChoice
from nystrom.integrations import set_attention
from nystrom.integrations.attention_interface import REGISTERED, attend_layer, option_names
from nystrom.models import EncoderConfig

SMALL = {
    "nystrom": {"num_landmarks": 4},
    "near_far": {"block_size": 4, "reach": 1, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0},
    "skyformer": {"num_landmarks": 4},
    "skyformer_softmax": {"num_landmarks": 4},
    "performer": {"num_features": 6},
    "informer": {"num_queries": 5, "num_samples": 7},
    "reformer": {"num_hashes": 2, "chunk_size": 4, "num_buckets": 4},
    "longformer": {"window": 5},
    "bigbird": {"block_size": 2, "num_random_blocks": 1},
}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
# float32 through two layers.
CLOSE = {"rtol": 0, "atol": 1e-4}


def make(config=None, implementation="nystrom", kind=AutoModel.from_config, **options):
    config = BertConfig(**SIZES, vocab_size=64, pad_token_id=0) if config is None else config
    config.attention_options = options
    config._attn_implementation = implementation
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                # Scores far from zero: otherwise every token is the mean of all, with any method.
                parameter.normal_(std=0.15)
    return model


def text(padded=True):
    ids = torch.randint(3, 60, (2, 21), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 14:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def run(model, **inputs):
    with torch.no_grad():
        return model(**inputs)[0]


def test_a_model_that_was_saved_keeps_its_options_and_takes_the_name_when_loaded(tmp_path):
    model = make(num_landmarks=4)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, attn_implementation="nystrom")
    assert loaded.config.attention_options == {"num_landmarks": 4}
    assert_close(run(loaded, **text()), run(model, **text()), rtol=0, atol=0)
    exact = AutoModel.from_pretrained(tmp_path)
    assert (run(exact, **text()) - run(model, **text()))[0].abs().max() > 0.01


@pytest.mark.parametrize("method", REGISTERED)
def test_padding_and_neighbours_change_nothing_with_any_method(method):
    model, inputs = make(implementation=method, **SMALL.get(method, {})), text()
    together = run(model, **inputs)
    for row, length in ((0, 21), (1, 14)):
        alone = run(model, input_ids=inputs["input_ids"][row : row + 1, :length])
        assert_close(together[row : row + 1, :length], alone, **CLOSE)
    exact = run(make(implementation="sdpa"), **inputs)
    assert (together - exact)[0].abs().max() > 0.01
    assert_close(run(make(implementation=method, **SMALL.get(method, {})), **inputs), together, rtol=0, atol=0)


def test_padding_at_the_left_changes_nothing():
    model, ids = make(num_landmarks=4), text()["input_ids"]
    positions = torch.arange(21)
    alone = run(model, input_ids=ids, position_ids=positions[None])
    padded, mask = (torch.nn.functional.pad(x, (5, 0)) for x in (ids, torch.ones_like(ids)))
    positions = torch.nn.functional.pad(positions, (5, 0))[None]
    assert_close(run(model, input_ids=padded, attention_mask=mask, position_ids=positions)[:, 5:], alone, **CLOSE)


def test_options_of_a_call_win_over_those_of_the_configuration():
    few, many = make(num_landmarks=4), make(num_landmarks=1000)
    assert_close(run(few, **text(), num_landmarks=1000), run(many, **text()), rtol=0, atol=0)
    assert (run(few, **text()) - run(many, **text()))[0].abs().max() > 0.01
    ridge = run(few, **text(), pinv="ridge")
    assert (ridge - run(few, **text()))[0].abs().max() > 1e-3
    assert_close(run(make(num_landmarks=4, pinv="ridge"), **text()), ridge, rtol=0, atol=0)


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("method", "stored", "called", "message"),
    [
        (
            "nystrom",
            {"landmark": 3},
            {},
            "option of nystrom in config.attention_options 'landmark' is unknown.*Perhaps you meant 'landmarks'",
        ),
        ("nystrom", {"scale": 1.0}, {}, "option of nystrom in config.attention_options 'scale' is unknown"),
        ("nystrom", {"num_landmarks": 0}, {}, "num_landmarks is 0"),
        ("nystrom", {}, {"num_landmark": 3}, "BertSelfAttention passes num_landmark to attention.*num_landmarks"),
        ("linear", {}, {"num_landmarks": 3}, "passes num_landmarks to attention, which linear attention cannot honour"),
        (
            "performer",
            {"redraw_steps": 5},
            {},
            "option of performer in config.attention_options 'redraw_steps' is unknown",
        ),
        ("nystrom", {}, {"output_attentions": True}, "output_attentions is True, but nystrom attention stores no"),
        ("nystrom", {}, {"is_causal": True}, "BertSelfAttention is causal"),
    ],
)
def test_an_option_that_the_method_does_not_have_raises_by_name(method, stored, called, message):
    with pytest.raises(ValueError, match=message):
        run(make(implementation=method, **stored), **text(), **called)


@pytest.mark.refuses
@pytest.mark.parametrize("exact_layers", [[], [0, 1]])
def test_weights_that_a_configuration_asks_for_raise(exact_layers):
    config = BertConfig(**SIZES, vocab_size=64, pad_token_id=0, output_attentions=True)
    model = make(config, num_landmarks=4, exact_layers=exact_layers)
    with pytest.raises(ValueError, match="output_attentions is True, but nystrom attention stores no weights"):
        run(model, **text())
    # One that is not asked for them gives the rest.
    model.config._output_attentions = False
    assert model(**text(), output_hidden_states=True).attentions is None


@pytest.mark.refuses
def test_methods_with_weights_of_their_own_are_not_registered():
    for name in ("linformer", "softmax"):
        assert name not in REGISTERED
        with pytest.raises(ValueError, match=f"attn_implementation is '{name}'; expected one of nystrom, "):
            make(implementation=name)
    assert option_names("performer") == {"num_features", "exact_heads", "exact_layers"}


def test_layers_that_are_named_run_exact_attention():
    exact, few = run(make(implementation="sdpa"), **text())[0], run(make(num_landmarks=4), **text())[0]
    assert_close(run(make(num_landmarks=4, exact_layers=[0, 1]), **text())[0], exact, **CLOSE)
    half = run(make(num_landmarks=4), **text(), exact_layers=(1,))[0]
    assert min((half - exact).abs().max(), (half - few).abs().max()) > 1e-3


@pytest.mark.refuses
@pytest.mark.parametrize("layers", [[-1], [2], [True], ["0"]])
def test_layers_that_the_model_has_not_raise(layers):
    with pytest.raises(ValueError, match=r"exact_layers is .*; expected layers 0 to 1 of this model"):
        run(make(num_landmarks=4, exact_layers=layers), **text())


@pytest.mark.parametrize("method", REGISTERED)
def test_exact_heads_attend_as_transformers_does_also_where_heads_share_keys(method):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 300, 8, generator=g) for heads in (4, 2, 2))
    keep = torch.arange(300) < torch.tensor([[300], [290]])
    layer, options = Layer(), {"scaling": 0.4, "exact_heads": [3, 1], **SMALL.get(method, {})}
    out = attend_layer(method, layer, q, k, v, keep[:, None, None], **options)[0].transpose(1, 2)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    exact = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None], scale=0.4)
    few = [x[:, [0, 2]] for x in (q, k, v)]
    others = attend_layer(method, layer, *few, keep[:, None, None], **options | {"exact_heads": ()})[0].transpose(1, 2)
    assert_close(out[:, [3, 1]], exact[:, [3, 1]] * keep[:, None, :, None], **CLOSE)
    assert_close(out[:, [0, 2]], others, **CLOSE)
    with pytest.raises(ValueError, match="exact_heads names head 4; the layer has heads 0 to 3"):
        attend_layer(method, layer, q, k, v, None, **options | {"exact_heads": [4]})


def test_exact_heads_of_a_plan_are_those_of_their_layer():
    options, model = {"num_landmarks": 4}, make(implementation="sdpa")
    choices = [LayerChoice("nystrom", options | {"exact_heads": [0, 1, 2]}), LayerChoice("nystrom", options)]
    runs = {}
    for name, layers in {"few": choices[1:] * 2, "first": choices, "last": choices[::-1]}.items():
        set_attention(model, AttentionPlan(tuple(layers)))
        runs[name] = run(model, **text())[0]
    assert min((runs["few"] - runs["first"]).abs().max(), (runs["last"] - runs["first"]).abs().max()) > 1e-3
    assert_close(run(make(**choices[0].options), **text())[0], run(make(**options), **text(), exact_heads=[0, 1, 2])[0])


def test_exact_layers_keep_their_padding():
    together = run(make(num_landmarks=4, exact_layers=[0, 1]), **text())
    alone = run(make(implementation="sdpa"), input_ids=text()["input_ids"][1:, :14])
    assert_close(together[1:, :14], alone, **CLOSE)


def vit(**options):
    return make(ViTConfig(**SIZES, image_size=32, patch_size=4), **options)


@pytest.mark.refuses
def test_layers_without_a_number_raise_and_can_be_set_themselves():
    pixels = {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))}
    with pytest.raises(ValueError, match=r"exact_layers is \[0\], but ViTAttention does not know its number"):
        run(vit(exact_layers=[0]), **pixels)
    model, exact = vit(num_landmarks=4), run(vit(implementation="sdpa"), **pixels)
    few = run(model, **pixels)
    for layer in model.layers[:1]:
        set_attention(layer, "sdpa")
    half = run(model, **pixels)
    assert min((half - exact).abs().max(), (half - few).abs().max()) > 1e-3
    set_attention(model.layers[1], "sdpa")
    assert_close(run(model, **pixels), exact, **CLOSE)


def modernbert_config():
    return ModernBertConfig(
        **SIZES, vocab_size=64, pad_token_id=0, local_attention=6, global_attn_every_n_layers=2, cls_token_id=1,
        sep_token_id=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def modernbert(**options):
    return make(modernbert_config(), **options)


def test_local_layers_stay_local_and_exact():
    """The second layer sees three tokens on either side: anything further away reaches it only through the first."""
    model, inputs = modernbert(num_landmarks=1000), text()
    assert_close(run(model, **inputs)[0], run(modernbert(implementation="sdpa"), **inputs)[0], **CLOSE)
    few = run(modernbert(num_landmarks=4), **inputs)
    assert_close(few[1:, :14], run(modernbert(num_landmarks=4), input_ids=inputs["input_ids"][1:, :14]), **CLOSE)


def pairs():
    pairs = torch.rand(2, 1, 21, 21, generator=torch.Generator().manual_seed(2)) < 0.5
    return {"input_ids": text()["input_ids"], "attention_mask": pairs | torch.eye(21, dtype=torch.bool)}


@pytest.mark.refuses
@pytest.mark.parametrize("config", [None, modernbert_config()])
def test_a_boolean_mask_per_pair_of_tokens_raises_by_name(config):
    with pytest.raises(ValueError, match=r"a mask of shape \(2, 1, 21, 21\), one per pair of tokens, which nystrom"):
        run(make(config, num_landmarks=4), **pairs())
    heads = pairs()["attention_mask"].expand(2, 4, 21, 21)
    with pytest.raises(ValueError, match=r"a mask of shape \(2, 4, 21, 21\), one per pair of tokens"):
        run(make(config, num_landmarks=4), input_ids=text()["input_ids"], attention_mask=heads)


def test_exact_layers_take_a_boolean_mask_per_pair_of_tokens():
    exact = run(make(implementation="sdpa"), **pairs())
    assert_close(run(make(num_landmarks=4, exact_layers=[0, 1]), **pairs()), exact, rtol=0, atol=0)


def test_a_row_of_real_keys_for_all_queries_is_padding():
    rows = text() | {"attention_mask": text()["attention_mask"].bool()[:, None, None]}
    assert_close(run(make(num_landmarks=4), **rows), run(make(num_landmarks=4), **text()), rtol=0, atol=0)


@pytest.mark.refuses
def test_other_masks_raise_by_name():
    model, ids = make(num_landmarks=4), text()["input_ids"]
    with pytest.raises(ValueError, match=r"a mask of shape \(2, 1, 21, 21\) and torch.float32; nystrom"):
        run(model, input_ids=ids, attention_mask=torch.zeros(2, 1, 21, 21))
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 21, 21\); expected \(batch, tokens\)"):
        run(model, input_ids=ids, attention_mask=torch.ones(2, 21, 21))


@pytest.mark.refuses
def test_sequences_of_a_model_that_numbers_them_stand_in_one_row_in_one_piece_each():
    model, ids = make(EsmcConfig(**SIZES, vocab_size=64, pad_token_id=0), num_landmarks=4), text()["input_ids"]
    numbers = (torch.arange(21) > 9).long()[None]
    with pytest.raises(ValueError, match="packed sequences in 2 rows; expected one row"):
        run(model, input_ids=ids, sequence_id=numbers.expand(2, -1))
    with pytest.raises(ValueError, match="numbers of packed sequences that decrease"):
        run(model, input_ids=ids[:1], sequence_id=1 - numbers)
    run(model, input_ids=ids[:1], sequence_id=numbers)


def test_dropout_of_weights_is_reported_in_training_and_other_dropout_works():
    config = BertConfig(**SIZES, vocab_size=64, pad_token_id=0, hidden_dropout_prob=0.5)
    model = make(config, kind=BertForSequenceClassification, num_landmarks=4)
    run(model, **text())
    with pytest.warns(UserWarning, match=r"BertSelfAttention's dropout of 0\.1 on them has no effect"):
        loss = model.train()(**text(), labels=torch.tensor([0, 1])).loss
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    config.attention_probs_dropout_prob = 0.0
    quiet = make(config, kind=BertForSequenceClassification, num_landmarks=4).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = (quiet(**text()).logits for _ in range(2))
    assert not torch.equal(first, second)


class Layer(nn.Module):
    """A layer with the attributes of those in transformers' models."""

    config, is_causal = None, False

    def __init__(self, **stated):
        super().__init__()
        vars(self).update(stated)

    def forward(self, hidden_states, attention_mask=None):
        """Attend to one sequence."""


class EitherLayer(Layer):
    def forward(self, hidden_states, key_value_states=None, attention_mask=None):
        """Attend to one sequence, or to another."""


class CachedLayer(Layer):
    def forward(self, hidden_states, attention_mask=None, cache=None):
        """Attend to one sequence, whose first tokens are in a cache: as transformers names it from 5.24 on."""


class LayerWithPast(Layer):
    def forward(self, hidden_states, attention_mask=None, past_key_values=None):
        """Attend to one sequence, whose first tokens are in a cache: as transformers names it up to 5.23."""


class OtherLayer(Layer):
    def forward(self, hidden_states, encoder_hidden_states, attention_mask=None):
        """Attend to another sequence."""


class LayerOfCrossAttention(Layer):
    def forward(self, queries, keys, values, attention_mask=None):
        """Attend to whatever is given."""


@pytest.mark.parametrize(
    ("layer", "elsewhere"),
    [
        (Layer(), False),
        (Layer(is_cross_attention=True), True),
        (EitherLayer(is_decoder=False), False),
        (EitherLayer(is_decoder=True), True),
        (EitherLayer(is_cross_attention=False), False),
        (OtherLayer(), True),
        (OtherLayer(is_cross_attention=False), False),
        (LayerOfCrossAttention(), True),
    ],
)
def test_cross_attention_of_equal_lengths_keeps_all_queries(layer, elsewhere):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 9, 8, generator=g) for _ in range(3))
    keep = torch.arange(9) < torch.tensor([[9], [5]])
    out, _ = attend_layer("nystrom", layer, q, k, v, keep[:, None, None], num_landmarks=20)
    exact = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None])
    assert_close(out, exact.transpose(1, 2), **CLOSE)
    few, _ = attend_layer("nystrom", layer, q, k, v, keep[:, None, None], num_landmarks=3)
    # Numbers of a masked token reach real queries only if the layer does not mask the token as a query.
    other, _ = attend_layer(
        "nystrom", layer, q + 5 * ~keep[:, None, :, None], k, v, keep[:, None, None], num_landmarks=3
    )
    assert ((few - other)[keep].abs().max() > 1e-3) == elsewhere


@pytest.mark.parametrize("kind", [CachedLayer, LayerWithPast])
def test_queries_that_follow_those_of_a_cache_are_the_last_keys_and_masked_like_them(kind):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 8, generator=g) for n in (9, 12, 12))
    keep = torch.arange(12) < torch.tensor([[12], [8]])
    out, other = (
        attend_layer("nystrom", kind(), queries, k, v, keep[:, None, None], num_landmarks=3)[0]
        for queries in (q, q + 5 * ~keep[:, None, 3:, None])
    )
    assert torch.equal(out[keep[:, 3:]], other[keep[:, 3:]])


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (BertConfig(max_position_embeddings=2048), near_far_sizes(2048, selects=False)),
        # RoBERTa's table begins with two rows that no token has.
        (RobertaConfig(max_position_embeddings=514), near_far_sizes(512, selects=False)),
        (ViTConfig(), {}),
        (SimpleNamespace(max_position_embeddings=-1), {}),
        (SimpleNamespace(max_position_embeddings=2048), near_far_sizes(2048, selects=False)),
    ],
    ids=["bert", "roberta", "vit", "no limit", "not of transformers"],
)
def test_near_far_has_sizes_for_the_longest_input_unless_told_otherwise(config, wanted):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 1300, 8, generator=g) for _ in range(3))
    layer = Layer()
    layer.config = config
    for told in ({}, {"num_heavy": 12}):
        out, _ = attend_layer("near_far", layer, q, k, v, None, **told)
        assert_close(out.transpose(1, 2), near_far_attention(q, k, v, **(wanted | told)), **CLOSE)
        short, _ = attend_layer("near_far", layer, q[:, :, :900], k[:, :, :900], v[:, :, :900], None, **told)
        exact = nn.functional.scaled_dot_product_attention(q[:, :, :900], k[:, :, :900], v[:, :, :900])
        assert_close(short.transpose(1, 2), exact, rtol=1e-5, atol=1e-6)


def test_cross_attention_has_no_near_tokens_with_and_without_a_mask():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 40, 8, generator=g) for _ in range(3))
    options = {"block_size": 4, "reach": 1, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0}
    some = torch.arange(40) < torch.tensor([[40], [31]])
    masks = (None, torch.ones(2, 1, 1, 40, dtype=torch.bool), some[:, None, None])
    for layer, near in ((OtherLayer(is_decoder=False), False), (Layer(), True)):
        outs = [attend_layer("near_far", layer, q, k, v, mask, **options)[0][0] for mask in masks]
        # The first sequence is real to its end, whatever its neighbour is.
        assert_close(outs[1], outs[0], **CLOSE)
        assert_close(outs[2], outs[0], **CLOSE)
        key_keep = None if near else torch.ones(2, 40, dtype=torch.bool)
        expected = near_far_attention(q, k, v, key_keep=key_keep, **options)
        assert_close(outs[0], expected[0].transpose(0, 1), **CLOSE)


@pytest.mark.parametrize("method", REGISTERED)
def test_a_masked_query_gets_the_output_of_exact_attention_and_nothing_else_changes(method):
    """ColBERT masks and scores the expansion of a query."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 40, 8, generator=g) for _ in range(3))
    keep = torch.arange(40) < torch.tensor([[12], [0]])
    out, _ = attend_layer(method, Layer(), q, k, v, keep[:, None, None], scaling=0.4, **SMALL.get(method, {}))
    exact = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None], scale=0.4)
    assert_close(out[0, 12:], exact.transpose(1, 2)[0, 12:], **CLOSE)
    assert (out[1] == 0).all()
    long, _ = attend_layer(
        method, Layer(), *(x.repeat(1, 1, 7, 1) for x in (q, k, v)), keep.repeat(1, 7)[:, None, None]
    )
    assert (long[0][~keep[0].repeat(7)] == 0).all()


def test_a_model_gives_masked_tokens_the_states_of_exact_attention():
    exact, near = make(implementation="sdpa"), make(implementation="near_far")
    assert_close(run(near, **text()), run(exact, **text()), **CLOSE)


# PEFT asks for an attribute, and passes the cache, by names that transformers is giving up.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("method", ["nystrom", "near_far"])
def test_a_prefix_of_peft_keeps_what_padding_holds_from_real_tokens(method):
    peft = pytest.importorskip("peft")
    model = make(implementation=method, **SMALL[method])
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=5))
    inputs = text()
    together = run(model, **inputs)
    for row, n in ((0, 21), (1, 14)):
        ids = inputs["input_ids"][row : row + 1, :n]
        alone = run(model, input_ids=ids, attention_mask=torch.ones_like(ids))
        assert_close(together[row : row + 1, :n], alone, **CLOSE)


@pytest.mark.refuses
def test_a_layer_that_could_attend_to_either_sequence_raises_where_the_mask_does_not_say():
    q = torch.randn(2, 4, 9, 8, generator=torch.Generator().manual_seed(0))
    keep = (torch.arange(9) < torch.tensor([[9], [5]]))[:, None, None]
    for queries in (q, q[:, :, :5]):
        with pytest.raises(
            ValueError, match=r"EitherLayer may attend to its own .*\(key_value_states\).*is_cross_attention"
        ):
            attend_layer("nystrom", EitherLayer(), queries, q, q, keep)
    # Without a mask nothing is ambiguous.
    assert attend_layer("nystrom", EitherLayer(), q, q, q, None)[0].isfinite().all()
    assert attend_layer("nystrom", EitherLayer(), q[:, :, :5], q, q, None)[0].isfinite().all()


def test_a_model_of_two_towers_takes_a_method_in_one():
    sizes = {**SIZES, "image_size": 32, "patch_size": 4}
    config = CLIPConfig(vision_config=sizes, text_config={**SIZES, "vocab_size": 64, "eos_token_id": 2})
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    outputs = []
    for chosen in ("sdpa", {"vision_config": "nystrom", "text_config": "sdpa"}):
        torch.manual_seed(0)
        model = CLIPModel._from_config(config, attn_implementation=chosen).eval()
        model.config.vision_config.attention_options = {"num_landmarks": 1000}
        with torch.no_grad():
            outputs.append(model(input_ids=text()["input_ids"], pixel_values=pixels).logits_per_image)
    assert_close(*outputs, **CLOSE)


@pytest.mark.parametrize(
    "method", ["nystrom", *(pytest.param(name, marks=pytest.mark.long) for name in ("sdpa", "skyformer", "linear"))]
)
@pytest.mark.parametrize("masked", [False, True])
def test_compile_makes_one_graph(method, masked):
    torch._dynamo.reset()
    model, inputs, counter = make(implementation=method, **SMALL.get(method, {})), text(), CompileCounter()
    if not masked:
        del inputs["attention_mask"]
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for n in (13, 21, 17):
        some = {name: x[:, :n].clone() for name, x in inputs.items()}
        assert_close(run(compiled, **some), run(model, **some), **CLOSE)
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.refuses
def test_this_librarys_own_encoder_raises_for_a_second_choice_of_attention():
    config = EncoderConfig(**SIZES, vocab_size=64)
    with pytest.raises(
        ValueError, match=r"attn_implementation is 'skyformer'.*takes its attention from the configuration"
    ):
        AutoModel.from_config(config, attn_implementation="skyformer")
