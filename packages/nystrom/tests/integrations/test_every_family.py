"""Every family of transformers that reads tokens, as a tiny random model: what docs/families.md says of it.

Equal to its exact self in the exact limit, or refused by name: without a mask, with padding at either end, and with
positions that restart. Families that these sizes do not make, or that read images or sound, are not in its table;
`test_families.py` has more of them.
"""

import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel
from transformers.models.auto import modeling_auto

from nystrom.integrations.first_checks import asking_layers

PAGE = Path(__file__).parents[4] / "docs" / "families.md"
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
# Keys and values from a latent, and other heads.
LATENT = {
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    **{"num_key_value_heads": 4, "n_group": 1, "topk_group": 1},
}
CHANGES = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "mistral4", "sarvam_mla"), LATENT),
    **{"distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}, "esmc": {"num_key_value_heads": 4}},
    **{"neomme": {"head_dim": 16}, "xmod": {"languages": ["en_XX"], "default_language": "en_XX"}},
    # Every fourth layer attends; the first sizes have two layers.
    **{name: {"num_hidden_layers": 4} for name in ("qwen3_5", "qwen3_5_moe")},
}
# Small sizes in the approximate range.
SMALL = {"block_size": 4, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0}
# Words of the errors, by the reason on the page.
REASONS = {
    "causal": "asks for a causal mask|is causal, and",
    "sinks": "passes s_aux",
    "soft capping": "passes softcap",
    "bias": "relative positions|and torch.float32",
    "mask": "one per pair of tokens|custom mask pattern|passes indices",
    "unclear": "but its mask is causal|does not say whether it is causal",
    "own": "has attention of its own|does not ask transformers' AttentionInterface",
}
# Whose own forward fails in this version with any attention: it asks for a field that the outputs of its text have not.
FAILS = {"llama4"} if transformers.__version__ == "5.24.0" else set()
MOST_WEIGHTS = 30_000_000
N, LATER = 40, 30


def table():
    """The families of the page, each with what it says of near_far and of nystrom: equal, or why not."""
    tokens = PAGE.read_text(encoding="utf-8").partition("## Tokens\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([a-z ]+) \| ([a-z ]+) \| (`.*`) \|$", tokens, flags=re.MULTILINE)
    return {family: (near, other) for near, other, families in rows for family in re.findall(r"`(.+?)`", families)}


TABLE = table()
# Families of which some method is refused in the first call alone.
LATE = set(re.findall(r"`(.+?)`", re.search(r"^First call alone: (.*)$", PAGE.read_text("utf-8"), re.MULTILINE)[1]))


def sizes(config, changes):
    """The sizes that a configuration knows, and those of its parts."""
    known = set(config.__dataclass_fields__) - set(config.attribute_map)
    parts = {name: part for name, part in config.sub_configs.items() if part is not AutoConfig}
    given = {name: size for name, size in (SIZES | changes).items() if name in known}
    return given | {name: sizes(part, changes) for name, part in parts.items()}


def make(family):
    """The model, with weights far from uniform attention; skips what these sizes do not make."""
    kind, changes = CONFIG_MAPPING[family], CHANGES.get(family, {})
    try:
        with torch.device("meta"):
            shell = AutoModel.from_config(kind(**sizes(kind, changes)), attn_implementation="eager")
        if sum(weight.numel() for weight in shell.parameters()) > MOST_WEIGHTS:
            skip(family, "parts of its own sizes")
        torch.manual_seed(0)
        model = AutoModel.from_config(kind(**sizes(kind, changes)), attn_implementation="eager").eval()
    except Exception as error:  # noqa: BLE001 - each family has errors of its own
        skip(family, f"needs other sizes: {error}")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(std=0.15)
    return model


def skip(family, reason):
    assert family not in TABLE or family in FAILS, reason
    pytest.skip(reason)


def make_inputs(model):
    """Inputs by kind, and which of their outputs are real: None, all."""
    taken = inspect.signature(model.forward).parameters
    ids = torch.randint(3, 60, (2, N), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids} | ({"use_cache": False} if "use_cache" in taken else {})
    keep, real = (torch.arange(N) < torch.tensor([[N], [28]])).long(), None
    if "decoder_input_ids" in taken:
        inputs["decoder_input_ids"] = ids
    else:
        real = keep.bool()
    yield inputs, None
    if "attention_mask" in taken:
        yield inputs | {"attention_mask": keep}, real
        yield inputs | {"attention_mask": keep.flip(1)}, None if real is None else real.flip(1)
    if "position_ids" in taken and real is not None:
        restart = torch.cat([torch.arange(25), torch.arange(N - 25)])[None]
        yield inputs | {"input_ids": ids[:1], "position_ids": restart}, None


def run(model, inputs):
    torch.manual_seed(2)
    with torch.no_grad():
        return model(**inputs)[0]


def outcome(model, method, options, inputs, exact, real):
    """`equal`, or what the error says, in the words of the page; and whether the first call alone says it."""
    late = False
    try:
        model.set_attn_implementation(method)
        model.config.attention_options, late = options, True
        out = run(model, inputs)
    except ValueError as error:
        return next((reason for reason, says in REASONS.items() if re.search(says, str(error))), str(error)), late
    if real is not None and out.shape[:2] == real.shape:
        out, exact = out[real], exact[real]
    # float32 through two layers, with states of any size.
    assert_close(out, exact, rtol=0, atol=1e-4 * max(1.0, exact.abs().max().item()))
    return "equal", False


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", sorted(modeling_auto.MODEL_MAPPING_NAMES))
def test_a_family_is_equal_to_its_exact_self_or_refused_as_the_page_says(family):
    model = make(family)
    cases = list(make_inputs(model))
    plain = cases[0][0]
    try:
        wanted = [run(model, inputs) for inputs, _ in cases]
    except Exception as error:  # noqa: BLE001 - each family has errors of its own
        skip(family, f"needs other inputs: {error}")
    if not model._can_set_attn_implementation():
        try:
            AutoModel.from_config(model.config, attn_implementation="near_far")
        except ValueError as error:
            assert re.search(REASONS["own"], str(error))  # noqa: PT017 - most raise, and others have no attention
            assert TABLE.get(family) == ("own", "own")
            return
        skip(family, "has no attention")
    if not any(asking_layers(model)):
        skip(family, "has no layer of attention at these sizes")
    found = {
        method: {
            outcome(model, method, options, inputs, exact, real)
            for (inputs, real), exact in zip(cases, wanted, strict=True)
        }
        for method, options in (("near_far", None), ("nystrom", {"num_landmarks": 1000}))
    }
    words = [{word for word, _ in outcomes} for outcomes in found.values()]
    assert words == [{said} for said in TABLE.get(family, ("not in the table",) * 2)]
    assert any(late for outcomes in found.values() for _, late in outcomes) == (family in LATE)
    if words[0] != {"equal"}:
        return
    # In the approximate range, too, no state depends on later tokens.
    decoded = "decoder_input_ids" if "decoder_input_ids" in plain else "input_ids"
    changed = plain[decoded].clone()
    changed[:, LATER] = 3 + (changed[:, LATER] - 2) % 57
    moved = {}
    for name, options in {"eager": None, "near_far": SMALL}.items():
        model.set_attn_implementation(name)
        model.config.attention_options = options
        assert all(layer.config.attention_options == options for layer in asking_layers(model))
        before, after = run(model, plain), run(model, plain | {decoded: changed})
        moved[name] = (after - before)[:, :LATER].abs().max().item()
    # An encoder, or a decoder that routes tokens by their neighbours, sees later tokens by itself.
    assert moved["near_far"] < 1e-4 or moved["eager"] > 1e-4, moved
