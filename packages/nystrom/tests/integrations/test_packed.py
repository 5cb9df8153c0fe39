"""Packed sequences in models of transformers: each as if it were alone, without any padding."""

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    DataCollatorWithFlattening,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    RobertaConfig,
)

from nystrom.integrations import set_attention
from nystrom.integrations.layer_calls import attend_by, intercepted

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 50}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"exact_up_to": 0, "block_size": 4, "num_heavy": 2, "num_clusters": 3}
METHODS = {"nystrom": {"num_landmarks": 5}, "near_far": {**SMALL, "reach": 1}, "longformer": {"window": 5}}
ENCODERS = {
    "bert": BertConfig(**SIZES),
    "roberta": RobertaConfig(**SIZES, max_position_embeddings=100),
    # Every second layer is local, and exact.
    "modernbert": ModernBertConfig(
        **SIZES, **IDS, cls_token_id=1, sep_token_id=2, global_attn_every_n_layers=2, local_attention=8
    ),
}
DECODERS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, bos_token_id=1, eos_token_id=2),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=8),
}
LENGTHS = (9, 30, 1, 21, 28)


def texts():
    g = torch.Generator().manual_seed(0)
    return [torch.randint(3, 50, (1, n), generator=g) for n in LENGTHS]


def packed(first=0, **how):
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, position_ids_start=first, **how)
    batch = dict(collate([{"input_ids": ids[0].tolist()} for ids in texts()], return_tensors="pt"))
    del batch["labels"]
    return batch


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("exact", [(), (1,)])
def test_an_encoder_reads_each_sequence_alone(name, method, exact):
    torch.manual_seed(0)
    model = AutoModel.from_config(ENCODERS[name], attn_implementation=method).eval()
    set_attention(model, method, METHODS[method] | ({"exact_layers": exact} if exact else {}))
    states = model(**packed(2 if name == "roberta" else 0)).last_hidden_state
    alone = torch.cat([model(input_ids=ids).last_hidden_state for ids in texts()], dim=1)
    assert_close(states, alone, rtol=1e-4, atol=2e-6)
    found = torch.autograd.grad(states.square().sum(), model.get_input_embeddings().weight)[0]
    wanted = torch.autograd.grad(alone.square().sum(), model.get_input_embeddings().weight)[0]
    assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("told", ["by positions", "by boundaries, too"])
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("exact", [(), (1,)])
def test_a_decoder_reads_each_sequence_alone(name, told, exact):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(DECODERS[name], attn_implementation="near_far").eval()
    set_attention(model, "near_far", SMALL | ({"exact_layers": exact} if exact else {}))
    batch = packed()
    if told == "by positions":
        batch = {key: batch[key] for key in ("input_ids", "position_ids")}
    logits = model(**batch, use_cache=False).logits
    alone = torch.cat([model(input_ids=ids, use_cache=False).logits for ids in texts()], dim=1)
    assert_close(logits, alone, rtol=1e-4, atol=2e-6)


def test_exact_layers_of_a_decoder_are_exact_to_the_last_packed_token():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(DECODERS["llama"], attn_implementation="sdpa").eval()
    # More tokens than blocks, heavy keys and clusters tell apart, and no whole number of blocks
    parts = [torch.randint(3, 50, (1, n)) for n in (350, 9)]
    alone = torch.cat([model(input_ids=ids, use_cache=False).logits for ids in parts], dim=1)
    set_attention(model, "near_far", {"exact_layers": (0, 1)})
    positions = torch.cat([torch.arange(ids.shape[1]) for ids in parts])[None]
    logits = model(input_ids=torch.cat(parts, dim=1), position_ids=positions, use_cache=False).logits
    assert_close(logits, alone, rtol=1e-4, atol=2e-6)


@pytest.mark.refuses
def test_a_sliding_window_of_the_past_needs_positions():
    model = AutoModelForCausalLM.from_config(DECODERS["mistral"], attn_implementation="near_far").eval()
    batch = packed()
    del batch["position_ids"]
    with pytest.raises(ValueError, match=r"sliding window of 8 tokens.*pass position_ids that restart"):
        model(**batch, use_cache=False)


@pytest.mark.refuses
def test_what_is_no_packed_batch_is_refused():
    torch.manual_seed(0)
    model = AutoModel.from_config(ENCODERS["bert"], attn_implementation="nystrom").eval()
    batch = packed()
    with pytest.raises(ValueError, match="other cu_seq_lens_k"):
        model(**batch | {"cu_seq_lens_k": batch["cu_seq_lens_k"] + 1})
    with pytest.raises(ValueError, match=r"end at 89 tokens"):
        model(**batch | dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), batch["cu_seq_lens_q"][:-1]))
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -1] = 0
    with pytest.raises(ValueError, match="leave out attention_mask"):
        model(**batch, attention_mask=mask)
    # A mask of blocks, one per pair of tokens, is named with what serves instead.
    numbers = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    blocks = (numbers[:, None] == numbers)[None, None]
    with pytest.raises(ValueError, match=r"one per pair of tokens.*for packed sequences cu_seq_lens_q"):
        model(input_ids=batch["input_ids"], attention_mask=blocks)
    decoder = AutoModelForCausalLM.from_config(DECODERS["llama"], attn_implementation="near_far").eval()
    ids, positions = (torch.cat([batch[name]] * 2) for name in ("input_ids", "position_ids"))
    with pytest.raises(ValueError, match="packed sequences in 2 rows; expected one row"):
        decoder(input_ids=ids, position_ids=positions, use_cache=False)
    with (
        intercepted(model, lambda call: attend_by("nystrom", call, {})),
        pytest.raises(ValueError, match="cannot be inspected one sequence at a time"),
    ):
        model(**batch)
