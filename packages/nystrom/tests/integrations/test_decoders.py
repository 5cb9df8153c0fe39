"""Decoders of transformers with near_far: prompts by its causal form, what follows exactly over the cache."""

import inspect

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartModel,
    DynamicCache,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    StaticCache,
)

import nystrom.integrations
from nystrom import near_far_attention

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SIZES |= {"vocab_size": 60, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
FAMILIES = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8),
    "gpt2": GPT2Config(
        vocab_size=60,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    ),
}
SMALL = {"block_size": 8, "num_heavy": 3, "num_clusters": 5, "exact_up_to": 0}
every_family = pytest.mark.parametrize("family", FAMILIES)


def make(family, implementation="near_far", **options):
    torch.manual_seed(0)
    config = FAMILIES[family] if isinstance(family, str) else family
    config = type(config).from_dict(config.to_dict())
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        # Far from uniform attention, so that an approximation shows.
        for name, weight in model.named_parameters():
            if "q_proj" in name or "c_attn.weight" in name:
                weight *= 8
    model.config.attention_options = {**SMALL, **options}
    model.set_attn_implementation(implementation)
    return model


def ids(b=2, n=60):
    return torch.randint(1, 60, (b, n), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, tokens, cache=None, **named):
    if cache is not None:
        # The name from transformers 5.24 on, and the one before.
        named["cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"] = cache
    return model(input_ids=tokens, **named).logits


@every_family
def test_a_prompt_is_read_by_causal_near_far(family):
    tokens = ids()
    exact, near = logits(make(family, "sdpa"), tokens), logits(make(family), tokens)
    assert_close(near[:, :16], exact[:, :16], rtol=1e-4, atol=1e-5)
    assert (near[:, 30:] - exact[:, 30:]).abs().max() > 1e-3
    assert_close(logits(make(family, exact_up_to=64), tokens), exact, rtol=1e-4, atol=1e-5)
    # No later token matters.
    assert_close(logits(make(family), tokens[:, :41]), near[:, :41], rtol=1e-4, atol=1e-5)


def test_a_layer_computes_what_the_function_does():
    from transformers.models.llama.modeling_llama import LlamaAttention

    from nystrom.integrations.attention_interface import attend_layer

    config = LlamaConfig(**SIZES, num_key_value_heads=2)
    config.attention_options = SMALL
    layer = LlamaAttention(config, 0)
    q, k, v = torch.randn(2, 4, 50, 8), torch.randn(2, 2, 50, 8), torch.randn(2, 2, 50, 8)
    out, _ = attend_layer("near_far", layer, q, k, v, None, scaling=0.3)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    assert_close(out.transpose(1, 2), near_far_attention(q, k, v, is_causal=True, scale=0.3, **SMALL))


@every_family
def test_left_padding_changes_nothing(family):
    model, tokens = make(family), ids(b=1, n=50)
    padded = torch.nn.functional.pad(tokens, (9, 0))
    mask = (padded != 0).long()
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    out = logits(model, padded, attention_mask=mask, position_ids=positions)
    assert_close(out[:, 9:], logits(model, tokens), rtol=1e-4, atol=1e-5)
    together = torch.cat([padded, ids(b=1, n=59)])
    both = torch.cat([mask, torch.ones_like(mask)])
    places = torch.cat([positions, torch.arange(59)[None]])
    out = logits(model, together, attention_mask=both, position_ids=places)
    assert_close(out[0, 9:], logits(model, tokens)[0], rtol=1e-4, atol=1e-5)
    assert_close(out[1:], logits(model, together[1:]), rtol=1e-4, atol=1e-5)


@every_family
def test_what_follows_is_exact_over_the_cache(family):
    near, exact, tokens = make(family), make(family, "sdpa"), ids()
    cache = DynamicCache()
    logits(near, tokens[:, :40], cache=cache)
    copies = [DynamicCache(), DynamicCache()]
    for copy in copies:
        for number, layer in enumerate(cache.layers):
            copy.update(layer.keys.clone(), layer.values.clone(), number)
    wanted = logits(exact, tokens[:, 40:], cache=copies[0])
    assert_close(logits(near, tokens[:, 40:], cache=copies[1]), wanted, rtol=1e-4, atol=1e-5)
    one_by_one = [logits(near, tokens[:, i : i + 1], cache=cache) for i in range(40, 60)]
    assert_close(torch.cat(one_by_one, dim=1), wanted, rtol=1e-4, atol=1e-5)


@every_family
def test_generate_works_with_left_padding_and_beams(family):
    near, exact = make(family, exact_up_to=64), make(family, "sdpa")
    tokens, mask = ids(n=30), torch.ones(2, 30, dtype=torch.long)
    tokens[0, :7] = mask[0, :7] = 0
    for options in ({}, {"num_beams": 2}):
        asked = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, **options}
        assert torch.equal(near.generate(tokens, **asked), exact.generate(tokens, **asked))
    assert make(family).generate(tokens, attention_mask=mask, max_new_tokens=4, do_sample=False).shape == (2, 34)


def test_a_static_cache_reads_exactly():
    near, exact, tokens = make("llama"), make("llama", "sdpa"), ids(n=40)
    outs = [logits(m, tokens, cache=StaticCache(m.config, max_cache_len=64)) for m in (near, exact)]
    assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)


def test_layers_with_a_sliding_window_stay_as_they_are():
    tokens = ids()
    config = MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=6)
    assert_close(logits(make(config), tokens), logits(make(config, "sdpa"), tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_exact_layers_are_causal(padded):
    tokens, mask = ids(), torch.ones(2, 60, dtype=torch.long)
    if padded:
        mask[0, :9] = 0
    near, exact = make("llama", exact_layers=(0, 1)), make("llama", "sdpa")
    outs = [logits(model, tokens, attention_mask=mask) for model in (near, exact)]
    assert_close(outs[0][:, 9:], outs[1][:, 9:], rtol=1e-4, atol=1e-5)


def test_it_trains():
    model = make("llama").train()
    model(input_ids=ids(), labels=ids()).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_sizes_come_from_the_longest_input():
    config = LlamaConfig(**{**SIZES, "max_position_embeddings": 8192})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="near_far").eval()
    tokens = ids(b=1, n=4500)
    near = logits(model, tokens)
    model.config.attention_options = nystrom.near_far_sizes(8192, is_causal=True)
    assert_close(logits(model, tokens), near, rtol=0, atol=0)


def test_the_decoder_of_an_encoder_decoder_is_served():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 40}
    sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    model = BartModel(BartConfig(**sizes)).eval()
    model.config.attention_options = {**SMALL, "exact_up_to": 64}
    tokens = torch.randint(3, 40, (2, 20))
    with torch.no_grad():
        model.set_attn_implementation("near_far")
        near = model(input_ids=tokens, decoder_input_ids=tokens)[0]
        model.set_attn_implementation("sdpa")
        exact = model(input_ids=tokens, decoder_input_ids=tokens)[0]
    assert_close(near, exact, rtol=1e-4, atol=1e-5)
    # Cross-attention, too, chooses no keys by what comes later.
    model.config.attention_options = {**SMALL, "num_heavy": 1, "num_clusters": 1}
    model.set_attn_implementation("near_far")
    later = torch.cat([tokens[:, :-1], 43 - tokens[:, -1:]], dim=1)
    states = [model(input_ids=tokens, decoder_input_ids=decoded)[0][:, :-1] for decoded in (tokens, later)]
    assert_close(*states, rtol=0, atol=1e-6)


@pytest.mark.refuses
def test_other_methods_refuse_a_decoder_and_name_near_far():
    model = make("llama")
    model.config.attention_options = {}
    with pytest.raises(ValueError, match=r'LlamaAttention is causal, and nystrom attention sees .* use "near_far"'):
        model.set_attn_implementation("nystrom")
    # The mask is causal even if the layers do not say so.
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    model.set_attn_implementation("nystrom")
    with pytest.raises(ValueError, match=r'asks for a causal mask, which nystrom attention cannot.*"near_far"'):
        logits(model, ids())
