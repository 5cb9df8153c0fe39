"""The laws of the encoder: padding and neighbours change nothing, names are those of the published checkpoints."""

import weakref

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    NystromformerConfig,
    NystromformerForSequenceClassification,
)

from nystrom.attention.registry import METHODS
from nystrom.evaluation import evaluating
from nystrom.models import EncoderConfig, EncoderForSequenceClassification, EncoderModel

# So few landmarks that a sequence of a dozen tokens takes the method's own path.
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
# float64 rounding through an inverse whose condition is a few thousand.
CLOSE = {"rtol": 1e-8, "atol": 1e-9}
every_method = pytest.mark.parametrize("attention", METHODS)
both_norms = pytest.mark.parametrize("norm", ["post", "pre"])


def make_config(attention="nystrom", **changes):
    sizes = {"vocab_size": 17, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3}
    sizes |= {"intermediate_size": 16, "max_position_embeddings": 40, "initializer_range": 0.3, "conv_kernel_size": 5}
    return EncoderConfig(attention=attention, attention_options=SMALL.get(attention, {}), **(sizes | changes))


def make(attention="nystrom", kind=EncoderForSequenceClassification, **changes):
    torch.manual_seed(0)
    return kind(make_config(attention, **changes)).double().eval()


def draw_tokens(b, n, seed=1):
    return torch.randint(0, 17, (b, n), generator=torch.Generator().manual_seed(seed))


def padded(ids, left, right, filler):
    b = ids.shape[0]
    tokens = torch.cat([torch.full((b, left), filler), ids, torch.full((b, right), filler)], dim=1)
    mask = torch.zeros_like(tokens)
    mask[:, left : left + ids.shape[1]] = 1
    return tokens, mask


@every_method
@both_norms
@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_padding_at_either_end_changes_nothing(attention, norm, pooling):
    model, ids = make(attention, norm=norm, pooling=pooling), draw_tokens(2, 13)
    alone = model(ids, output_hidden_states=True)
    for left, right, filler in ((0, 4, 0), (3, 0, 7), (6, 11, 16)):
        tokens, mask = padded(ids, left, right, filler)
        among = model(tokens, attention_mask=mask, output_hidden_states=True)
        assert_close(among.logits, alone.logits, **CLOSE)
        for state, other in zip(among.hidden_states, alone.hidden_states, strict=True):
            assert_close(state[:, left : left + 13], other, **CLOSE)


@every_method
def test_neighbours_change_nothing(attention):
    model, ids = make(attention), draw_tokens(3, 14)
    mask = torch.ones_like(ids)
    mask[0, 9:], mask[1, :4], mask[2, 2:] = 0, 0, 0
    together = model(ids, attention_mask=mask).logits
    for row in range(3):
        alone = model(ids[row : row + 1], attention_mask=mask[row : row + 1]).logits
        assert_close(together[row : row + 1], alone, **CLOSE)


@every_method
@both_norms
def test_what_a_masked_token_holds_reaches_neither_logits_nor_gradients(attention, norm):
    model, mask = make(attention, norm=norm), torch.ones(2, 11, dtype=torch.bool)
    mask[0, 8:], mask[1, :3] = False, False
    words = torch.randn(2, 11, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    results = []
    for filler in (0.0, torch.nan):
        model.zero_grad()
        logits = model(inputs_embeds=torch.where(mask[..., None], words, filler), attention_mask=mask).logits
        logits.square().sum().backward()
        results.append((logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    assert_close(results[0], results[1], rtol=0, atol=0)


def test_a_sequence_without_a_real_token_gives_numbers():
    model, mask = make(), torch.ones(2, 9, dtype=torch.bool)
    mask[1] = False
    logits = model(draw_tokens(2, 9), attention_mask=mask).logits
    assert logits.isfinite().all()


def test_pooling_is_the_mean_of_the_real_tokens_and_the_first_of_them():
    ids, mask = draw_tokens(1, 9), torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0, 0]])
    for pooling, wanted in (("mean", lambda x: x[:, 2:7].mean(1)), ("first", lambda x: x[:, 2])):
        model = make(pooling=pooling)
        states = model.nystromformer(ids, attention_mask=mask).last_hidden_state
        assert_close(model(ids, attention_mask=mask).logits, model.classifier(wanted(states)), **CLOSE)


def test_token_zero_is_real_unless_it_is_masked():
    model, ids = make(), draw_tokens(1, 12)
    ids[0, 10:] = 0
    assert not torch.allclose(model(ids).logits, model(ids[:, :10]).logits)


def test_positions_start_at_row_two_as_published():
    model, ids = make(), draw_tokens(1, 6)
    rows = torch.arange(2, 8)[None]
    assert model.nystromformer.embeddings.position_embeddings.num_embeddings == 42
    assert_close(model(ids, position_ids=rows).logits, model(ids).logits, rtol=0, atol=0)
    assert not torch.allclose(model(ids, position_ids=rows - 2).logits, model(ids).logits)


def test_state_dict_names_and_shapes_are_the_published_ones():
    theirs = NystromformerForSequenceClassification(
        NystromformerConfig(
            vocab_size=17, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=40, conv_kernel_size=5, num_labels=3,
        )
    )  # fmt: skip
    shapes = [{name: tuple(w.shape) for name, w in model.state_dict().items()} for model in (theirs, make())]
    assert shapes[0] == shapes[1]


def test_their_weights_give_their_logits_where_theirs_is_exact_attention():
    theirs = NystromformerForSequenceClassification(
        NystromformerConfig(
            vocab_size=17, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=40, conv_kernel_size=5, num_labels=3, num_landmarks=8, segment_means_seq_len=8,
            initializer_range=0.3,
        )
    ).double().eval()  # fmt: skip
    ours, ids = make("softmax", pooling="first"), draw_tokens(2, 8)
    ours.load_state_dict(theirs.state_dict())
    assert_close(ours(ids).logits, theirs(ids, attention_mask=torch.ones_like(ids)).logits, **CLOSE)


def test_pre_norm_has_a_last_norm_and_none_on_the_embeddings():
    names = make(norm="pre").state_dict().keys()
    assert "nystromformer.encoder.LayerNorm.weight" in names
    assert not any(name.startswith("nystromformer.embeddings.LayerNorm") for name in names)


@every_method
@both_norms
def test_a_saved_model_comes_back_with_the_same_logits(attention, norm, tmp_path):
    model, ids = make(attention, norm=norm).float(), draw_tokens(2, 12)
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(loaded) is EncoderForSequenceClassification
    assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_a_saved_folder_says_what_to_import_whoever_saves_it(tmp_path):
    model = make()
    # A Trainer calls it this way.
    model.save_pretrained(tmp_path / "a", state_dict=model.state_dict())
    assert "`import nystrom.integrations` first" in (tmp_path / "a" / "README.md").read_text()
    (tmp_path / "a" / "README.md").write_text("mine")
    model.save_pretrained(tmp_path / "a")
    assert (tmp_path / "a" / "README.md").read_text() == "mine"
    model.save_pretrained(tmp_path / "b", is_main_process=False)
    assert not (tmp_path / "b" / "README.md").exists()


def test_auto_classes_know_the_encoder(tmp_path):
    make().save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is EncoderConfig
    assert type(AutoModel.from_config(make_config())) is EncoderModel
    assert type(AutoModelForSequenceClassification.from_config(make_config())) is EncoderForSequenceClassification


@every_method
@pytest.mark.long
def test_compile_makes_one_graph(attention):
    # Graphs compiled for other methods count towards the limit of graphs per function.
    torch._dynamo.reset()
    model, ids = make(attention), draw_tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits, **CLOSE)


def test_gradient_checkpointing_gives_the_same_gradients():
    model, ids = make(hidden_dropout_prob=0.0).train(), draw_tokens(2, 12)
    gradients = []
    for on in (False, True):
        if on:
            # transformers 5.23 renames it, and warns of the old name.
            new = getattr(model, "activation_checkpointing_enable", None)
            (new or model.gradient_checkpointing_enable)()
        model.zero_grad()
        model(ids, labels=torch.tensor([0, 2])).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(layer.gradient_checkpointing for layer in model.nystromformer.encoder.layer)
    assert_close(gradients[0], gradients[1], **CLOSE)


def test_the_loss_is_the_mean_over_the_batch():
    model, ids, labels = make(), draw_tokens(4, 10), torch.tensor([0, 1, 2, 0])
    whole = model(ids, labels=labels).loss
    parts = [model(ids[i : i + 1], labels=labels[i : i + 1]).loss for i in range(4)]
    assert_close(whole, torch.stack(parts).mean(), **CLOSE)
    assert type(model).accepts_loss_kwargs is False


def test_a_tuple_holds_what_the_object_holds():
    model, ids = make(), draw_tokens(2, 10)
    whole, parts = model(ids, output_hidden_states=True), model(ids, output_hidden_states=True, return_dict=False)
    assert len(whole.hidden_states) == 3
    assert_close(parts, whole.to_tuple(), rtol=0, atol=0)


def test_states_of_layers_are_kept_only_when_they_are_asked_for():
    model, ids = make(kind=EncoderModel, num_hidden_layers=4), draw_tokens(2, 10)
    alive, states = [], []

    def note(layer, inputs, output):
        states.append(weakref.ref(output))
        alive.append(sum(state() is not None for state in states))

    for layer in model.encoder.layer:
        layer.register_forward_hook(note)
    with torch.no_grad():
        model(ids)
        # The output of a layer, and its input.
        assert max(alive) == 2
        kept = model(ids, output_hidden_states=True)
    assert alive[-1] == 4
    assert len(kept.hidden_states) == 5
    assert_close(kept.hidden_states[-1], kept.last_hidden_state, rtol=0, atol=0)


def test_word_embeddings_can_be_resized():
    model = make(kind=EncoderModel)
    model.resize_token_embeddings(20)
    assert model(torch.tensor([[19, 1]])).last_hidden_state.shape == (1, 2, 12)


ids = draw_tokens(2, 6)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "neither input_ids nor inputs_embeds"),
        ({"input_ids": ids, "inputs_embeds": torch.zeros(2, 6, 12)}, "input_ids and inputs_embeds are both given"),
        ({"input_ids": ids[0]}, r"input_ids is \(6,\).*add a batch axis"),
        ({"input_ids": ids.float()}, "torch.float32; expected token ids"),
        (
            {"inputs_embeds": torch.zeros(2, 6, 5)},
            r"inputs_embeds has shape \(2, 6, 5\); expected \(batch, tokens, 12\)",
        ),
        (
            {"input_ids": draw_tokens(1, 41)},
            "input_ids holds 41 tokens.*40 positions.*max_position_embeddings=41.*`nystrom convert FOLDER --to OTHER "
            "--max-position-embeddings 41`",
        ),
        ({"input_ids": ids, "attention_mask": torch.ones(2, 1, 6, 6)}, r"attention_mask has shape \(2, 1, 6, 6\)"),
        (
            {"input_ids": ids, "attention_mask": torch.ones(2, 1, 1, 6).long()},
            r"one value per token: pass attention_mask.reshape\(2, 6\)",
        ),
        ({"input_ids": ids, "attention_mask": torch.ones(2, 5).long()}, r"attention_mask has shape \(2, 5\) but"),
        ({"input_ids": ids, "attention_mask": torch.zeros(2, 6)}, "attention_mask has dtype torch.float32"),
        ({"input_ids": ids, "token_type_ids": ids[:, :5]}, r"token_type_ids has shape \(2, 5\)"),
        ({"input_ids": ids, "position_ids": ids[0]}, r"position_ids has shape \(6,\)"),
        (
            {"input_ids": torch.full((2, 6), 17)},
            "input_ids holds 17; expected 0 to 16, since its table has 17 rows.*tokenizer",
        ),
        ({"input_ids": torch.full((2, 6), -100)}, "input_ids holds -100; expected 0 to 16"),
        ({"input_ids": ids, "token_type_ids": torch.full((2, 6), 2)}, "token_type_ids holds 2; expected 0 to 1, since"),
        (
            {"input_ids": ids, "position_ids": torch.arange(38, 44).expand(2, 6)},
            "position_ids holds 43; expected 0 to 41, since its table has 42 rows: the first token has row 2",
        ),
        ({"input_ids": ids, "output_attentions": True}, "output_attentions is True, but no method stores"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(wrong, says):
    with pytest.raises(ValueError, match=says):
        make(kind=EncoderModel)(**wrong)


def test_embeddings_of_another_dtype_are_refused_where_the_layers_could_not_take_them():
    vectors = torch.zeros(2, 6, 12)
    model = make(kind=EncoderModel).float()
    with pytest.raises(
        ValueError,
        match=r"inputs_embeds has dtype torch.float64, but the weights of the model have torch.float32: call "
        r"model.to\(torch.float64\) or inputs_embeds.to\(torch.float32\)\.$",
    ):
        model(inputs_embeds=vectors.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(inputs_embeds=vectors.bfloat16()).last_hidden_state.isfinite().all()
    assert model(inputs_embeds=vectors.half()).last_hidden_state.dtype == torch.float32
    with pytest.raises(ValueError, match=r"torch.float32, but .* torch.bfloat16: .* or run it under torch.autocast"):
        model.bfloat16()(inputs_embeds=vectors)
    assert model(inputs_embeds=vectors.bfloat16()).last_hidden_state.dtype == torch.bfloat16


@pytest.mark.parametrize("attention_mask", [None, torch.ones(2, 0, dtype=torch.long)])
@pytest.mark.parametrize("pooling", ["mean", "first", "max", "cls"])
def test_sequences_without_a_token_have_finite_logits_and_gradients(pooling, attention_mask):
    model = EncoderForSequenceClassification(make_config(pooling=pooling, short_conv_kernel_size=3))
    logits = model(torch.zeros(2, 0, dtype=torch.long), attention_mask=attention_mask).logits
    assert logits.shape == (2, 3)
    logits.sum().backward()
    assert logits.isfinite().all()


@pytest.mark.refuses
def test_the_attention_of_a_model_over_ranks_is_not_changed():
    model = EncoderModel(make_config())
    model.group = object()
    with pytest.raises(ValueError, match="set the attention before `parallelize`"):
        model.set_attention("softmax", {})


def test_each_part_is_in_its_mode_after_an_evaluation():
    model = EncoderModel(make_config()).train()
    model.embeddings.eval()
    before = {name: module.training for name, module in model.named_modules()}
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert before == {name: module.training for name, module in model.named_modules()}
    assert len({*before.values()}) == 2
