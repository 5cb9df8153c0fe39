"""Every decoder of transformers with near_far, as a tiny random model: equal to its exact self, or refused by name."""

import inspect

import pytest
import torch
from torch.testing import assert_close
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel
from transformers.models.auto import modeling_auto

import nystrom.integrations  # noqa: F401 - registers the method

SIZES = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"intermediate_size": 48, "moe_intermediate_size": 16, "vocab_size": 64, "max_position_embeddings": 80},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "ffn_dim": 48},
    **{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 80, "word_embed_proj_dim": 32},
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_heads": 4, "num_layers": 2, "d_ff": 48},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sliding_window": 6},
    **{"expert_capacity": 64, "block_size": 4, "query_pre_attn_scalar": 8, "d_kv": 8, "global_head_dim": 8},
}
# Small sizes in the approximate range.
SMALL = {"block_size": 4, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0}
FAMILIES = sorted(
    {*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    & {*modeling_auto.MODEL_MAPPING_NAMES}
)
# Some of those that must be equal; the others may refuse.
EQUAL = {
    *("bart", "bert-generation", "biogpt", "cohere", "gemma", "gemma3_text", "glm4", "gpt2", "gpt_neox", "granite"),
    *("llama", "m2m_100", "marian", "mbart", "mistral", "mixtral", "modernbert-decoder", "olmo2", "opt", "pegasus"),
    *("phi3", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "smollm3", "stablelm", "starcoder2"),
}
MOST_WEIGHTS = 30_000_000
N, LATER = 40, 30
# float32 through two layers.
CLOSE = {"rtol": 0, "atol": 1e-4}


def sizes(config):
    """The sizes that a configuration knows, and those of its parts."""
    known = set(config.__dataclass_fields__) - set(config.attribute_map)
    parts = {name: part for name, part in config.sub_configs.items() if part is not AutoConfig}
    return {name: SIZES[name] for name in known & set(SIZES)} | {name: sizes(part) for name, part in parts.items()}


def make(family):
    """The model, with weights far from uniform attention; skips what these sizes do not make."""
    kind = CONFIG_MAPPING[family]
    try:
        with torch.device("meta"):
            shell = AutoModel.from_config(kind(**sizes(kind)), attn_implementation="eager")
        if sum(weight.numel() for weight in shell.parameters()) > MOST_WEIGHTS:
            skip(family, "parts of its own sizes")
        torch.manual_seed(0)
        model = AutoModel.from_config(kind(**sizes(kind)), attn_implementation="eager").eval()
    except Exception as error:  # noqa: BLE001 - each family has errors of its own
        skip(family, f"needs other sizes: {error}")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(std=0.15)
    return model


def skip(family, reason):
    assert family not in EQUAL, reason
    pytest.skip(reason)


def run(model, inputs):
    torch.manual_seed(2)
    with torch.no_grad():
        return model(**inputs).last_hidden_state


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_equals_its_exact_self_or_is_refused_and_no_state_depends_on_later_tokens(family):
    model = make(family)
    if not model._can_set_attn_implementation():
        skip(family, "has attention of its own")
    taken = inspect.signature(model.forward).parameters
    ids = torch.randint(3, 60, (2, N), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids} | ({"use_cache": False} if "use_cache" in taken else {})
    decoded = "decoder_input_ids" if "decoder_input_ids" in taken else "input_ids"
    inputs[decoded] = ids
    masks = [torch.ones_like(ids), (torch.arange(N) < torch.tensor([[N], [28]])).long()]
    for mask in (None, masks[1], masks[1].flip(1)):
        given = inputs | ({} if mask is None else {"attention_mask": mask})
        model.set_attn_implementation("eager")
        try:
            exact = run(model, given)
        except Exception as error:  # noqa: BLE001 - each family has errors of its own
            skip(family, f"needs other inputs: {error}")
        model.set_attn_implementation("near_far")
        try:
            near = run(model, given)
        except ValueError:
            if family in EQUAL:
                raise
            continue
        real = masks[0].bool() if mask is None or decoded != "input_ids" else mask.bool()
        assert_close(near[real], exact[real], **CLOSE)
    changed = ids.clone()
    changed[:, LATER] = 3 + (ids[:, LATER] - 2) % 57
    moved = {}
    for name, options in {"eager": None, "near_far": SMALL}.items():
        model.set_attn_implementation(name)
        model.config.attention_options = options
        try:
            before, after = run(model, inputs), run(model, inputs | {decoded: changed})
        except ValueError:
            return
        moved[name] = (after - before)[:, :LATER].abs().max().item()
    # An encoder, or a decoder that routes tokens by their neighbours, sees later tokens by itself.
    assert moved["near_far"] < 1e-4 or moved["eager"] > 1e-4, moved
