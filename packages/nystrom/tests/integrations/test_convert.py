"""A converted model equals its source wherever the landmarks suffice, and reports what was left out."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    BertTokenizer,
    CamembertConfig,
    CamembertForMaskedLM,
    CamembertForSequenceClassification,
    NystromformerConfig,
    NystromformerForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForMultipleChoice,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from nystrom import near_far_sizes
from nystrom.command_options import ConvertOptions
from nystrom.integrations import set_attention
from nystrom.integrations.convert import convert
from nystrom.models import (
    EncoderConfig,
    EncoderForMaskedLM,
    EncoderForMultipleChoice,
    EncoderForPreTraining,
    EncoderForQuestionAnswering,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
    EncoderModel,
)
from nystrom.models.files.folder import copy_sentence_modules

SIZES = {
    "vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20,
    "initializer_range": 0.3, "type_vocab_size": 2, "layer_norm_eps": 1e-6,
}  # fmt: skip
# Positions that a token can have: RoBERTa's table has two more rows.
POSITIONS = 24
BERT = SIZES | {"max_position_embeddings": POSITIONS}
ROBERTA = SIZES | {"max_position_embeddings": POSITIONS + 2}
CONFIGS = {
    BertConfig: BERT, RobertaConfig: ROBERTA, XLMRobertaConfig: ROBERTA, CamembertConfig: ROBERTA,
}  # fmt: skip
# float32 rounding over two layers: the weights are the same, the fused calls are not.
HIDDEN, LOGITS = {"rtol": 0, "atol": 1e-5}, {"rtol": 0, "atol": 1e-4}


def make(kind, **changes):
    torch.manual_seed(0)
    config = kind.config_class(**(CONFIGS[kind.config_class] | changes))
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "LayerNorm" in name or "layer_norm" in name:
                # New models have biases of 0 and norms of 1: a misplaced one would not show.
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def save(model, folder):
    model.save_pretrained(folder)
    return folder


def draw_batch(pad):
    """Padding after one sequence of two; no real token has the id that RoBERTa takes for padding."""
    ids = torch.randint(3, 31, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[1, 12:], mask[1, 12:] = pad, 0
    return ids, mask


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize("kind", [BertModel, RobertaModel, XLMRobertaModel])
@pytest.mark.parametrize("conv_kernel_size", ["auto", 5, None])
def test_hidden_states_are_those_of_the_source(kind, conv_kernel_size, tmp_path):
    source = make(kind)
    convert(
        ConvertOptions(
            save(source, tmp_path / "a"), tmp_path / "b", num_landmarks=20, conv_kernel_size=conv_kernel_size
        )
    )
    ours, (ids, mask) = EncoderModel.from_pretrained(tmp_path / "b"), draw_batch(source.config.pad_token_id)
    segments = (torch.arange(20) > 8).long().expand(2, -1)
    for fed in (
        {"attention_mask": mask},
        {"attention_mask": mask, "token_type_ids": segments},
        {"inputs_embeds": torch.randn(2, 20, 16)},
    ):
        fed = fed if "inputs_embeds" in fed else {"input_ids": ids, **fed}
        wanted = source(**fed, output_hidden_states=True).hidden_states
        came = ours(**fed, output_hidden_states=True).hidden_states
        real = fed.get("attention_mask", torch.ones_like(ids)).bool()
        for theirs, state in zip(wanted, came, strict=True):
            assert_close(state[real], theirs[real], **HIDDEN)


@pytest.mark.parametrize("masked", [True, False])
def test_a_roberta_with_padding_inside_or_unmasked_keeps_its_results_by_its_own_position_ids(masked, tmp_path):
    """RoBERTa counts the ids that are no padding; the converted model all tokens from the first real one."""
    source = make(RobertaModel)
    convert(ConvertOptions(save(source, tmp_path / "a"), tmp_path / "b", num_landmarks=20))
    ours, pad = EncoderModel.from_pretrained(tmp_path / "b"), source.config.pad_token_id
    ids, _ = draw_batch(pad)
    ids[0, 5:8] = pad
    real = ids != pad
    fed = {"input_ids": ids, "attention_mask": real.long() if masked else None}
    wanted = source(**fed).last_hidden_state
    assert (ours(**fed).last_hidden_state - wanted)[0, 8:].abs().max() > 0.1
    counted = real.cumsum(dim=1) * real + 1
    assert_close(ours(**fed, position_ids=counted).last_hidden_state[real], wanted[real], **HIDDEN)


def test_a_bert_with_padding_on_the_left_keeps_its_results_by_its_own_position_ids(tmp_path):
    source = make(BertModel)
    convert(ConvertOptions(save(source, tmp_path / "a"), tmp_path / "b", num_landmarks=20))
    ours, (ids, mask) = EncoderModel.from_pretrained(tmp_path / "b"), draw_batch(0)
    fed, real = {"input_ids": ids.flip(1), "attention_mask": mask.flip(1)}, mask.flip(1).bool()
    wanted = source(**fed).last_hidden_state[real]
    assert (ours(**fed).last_hidden_state[real] - wanted).abs().max() > 0.1
    by_position = ours(**fed, position_ids=(torch.arange(20) + 2).expand(2, -1))
    assert_close(by_position.last_hidden_state[real], wanted, **HIDDEN)


@pytest.mark.parametrize("kind", [BertForMaskedLM, RobertaForMaskedLM, CamembertForMaskedLM])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_masked_words_are_those_of_the_source(kind, tied, tmp_path):
    source = make(kind, tie_word_embeddings=tied)
    done = convert(ConvertOptions(save(source, tmp_path / "a"), tmp_path / "b", num_landmarks=20))
    ours, (ids, mask) = AutoModelForMaskedLM.from_pretrained(tmp_path / "b"), draw_batch(source.config.pad_token_id)
    assert type(ours) is EncoderForMaskedLM
    assert done.left_behind == ()
    wanted, came = source(ids, attention_mask=mask).logits, ours(ids, attention_mask=mask).logits
    assert_close(came[mask.bool()], wanted[mask.bool()], **LOGITS)


@pytest.mark.parametrize(
    ("kind", "becomes"),
    [
        (BertForTokenClassification, EncoderForTokenClassification),
        (RobertaForTokenClassification, EncoderForTokenClassification),
        (BertForQuestionAnswering, EncoderForQuestionAnswering),
    ],
)
def test_a_linear_layer_on_every_token_is_carried_over(kind, becomes, tmp_path):
    labels = {} if becomes is EncoderForQuestionAnswering else {"id2label": {0: "O", 1: "PER", 2: "LOC"}}
    source = make(kind, **labels)
    convert(ConvertOptions(save(source, tmp_path / "a"), tmp_path / "b", num_landmarks=20))
    ours, (ids, mask) = becomes.from_pretrained(tmp_path / "b"), draw_batch(source.config.pad_token_id)
    wanted, came = source(ids, attention_mask=mask).to_tuple(), ours(ids, attention_mask=mask).to_tuple()
    for theirs, logits in zip(wanted, came, strict=True):
        assert_close(logits[mask.bool()], theirs[mask.bool()], **LOGITS)
    if labels:
        assert ours.config.id2label == labels["id2label"]


@pytest.mark.parametrize(
    "kind", [BertForSequenceClassification, RobertaForSequenceClassification, CamembertForSequenceClassification]
)
def test_a_classifier_of_sequences_keeps_its_logits_and_its_labels(kind, tmp_path):
    source = make(kind, id2label={0: "bad", 1: "fair", 2: "good"}, problem_type="multi_label_classification")
    save(source, tmp_path / "a")
    if kind is RobertaForSequenceClassification:
        # Published classifiers have this weight.
        tensors = load_file(tmp_path / "a" / "model.safetensors") | {"roberta.pooler.dense.weight": torch.ones(16, 16)}
        save_file(tensors, tmp_path / "a" / "model.safetensors")
    done = convert(ConvertOptions(tmp_path / "a", tmp_path / "b", num_landmarks=20))
    ours, (ids, mask) = AutoModelForSequenceClassification.from_pretrained(tmp_path / "b"), draw_batch(0)
    assert type(ours) is EncoderForSequenceClassification
    assert done.left_behind == (("roberta.pooler.dense.weight",) if kind is RobertaForSequenceClassification else ())
    assert_close(ours(ids, attention_mask=mask).logits, source(ids, attention_mask=mask).logits, **LOGITS)
    assert (ours.config.id2label, ours.config.problem_type) == (source.config.id2label, "multi_label_classification")


@pytest.mark.parametrize("kind", [BertForMultipleChoice, RobertaForMultipleChoice])
def test_scores_of_choices_are_those_of_the_source(kind, tmp_path):
    source = make(kind)
    convert(ConvertOptions(save(source, tmp_path / "a"), tmp_path / "b", num_landmarks=20))
    ours, (ids, mask) = EncoderForMultipleChoice.from_pretrained(tmp_path / "b"), draw_batch(0)
    fed = {"input_ids": ids[None], "attention_mask": mask[None]}
    assert_close(ours(**fed).logits, source(**fed).logits, **LOGITS)


def test_the_convolution_starts_at_zero_and_stays_there_when_it_is_loaded(tmp_path):
    done = convert(ConvertOptions(save(make(BertModel), tmp_path / "a"), tmp_path / "b"))
    ours = AutoModel.from_pretrained(tmp_path / "b")
    weights = [layer.attention.self.conv.weight for layer in ours.encoder.layer]
    assert [tuple(weight.shape) for weight in weights] == [(2, 1, 33, 1)] * 2
    assert all(weight.count_nonzero() == 0 and weight.requires_grad for weight in weights)
    assert len(done.started) == 2
    ours(torch.arange(20)[None]).last_hidden_state.square().sum().backward()
    assert all(weight.grad.abs().max() > 0 for weight in weights)


def test_a_longer_input_is_approximated(tmp_path):
    source = make(BertModel)
    convert(ConvertOptions(save(source, tmp_path / "a"), tmp_path / "b", num_landmarks=4))
    ours, ids = EncoderModel.from_pretrained(tmp_path / "b"), draw_batch(0)[0]
    assert ours.config.attention_options == {"num_landmarks": 4}
    assert not torch.allclose(ours(ids).last_hidden_state, source(ids).last_hidden_state, atol=1e-2)
    assert_close(ours(ids[:, :4]).last_hidden_state, source(ids[:, :4]).last_hidden_state, **HIDDEN)


@pytest.mark.parametrize(
    ("kind", "behind"),
    [
        (BertModel, {"pooler.dense.weight", "pooler.dense.bias"}),
        (
            BertForPreTraining,
            {
                *("bert.pooler.dense.weight", "bert.pooler.dense.bias"),
                *("cls.seq_relationship.weight", "cls.seq_relationship.bias"),
            },
        ),
    ],
)
def test_what_has_no_place_is_left_behind_by_name(kind, behind, tmp_path):
    done = convert(ConvertOptions(save(make(kind), tmp_path / "a"), tmp_path / "b", conv_kernel_size=5))
    assert set(done.left_behind) == behind
    assert all(name in str(done) for name in behind)
    assert done.model == ("EncoderForMaskedLM" if kind is BertForPreTraining else "EncoderModel")
    stored = load_file(tmp_path / "b" / "model.safetensors")
    assert done.parameters == sum(tensor.numel() for tensor in stored.values())


def test_the_head_of_roberta_keeps_its_activation_where_the_layers_have_another(tmp_path):
    source = make(RobertaForMaskedLM, hidden_act="relu")
    done = convert(ConvertOptions(save(source, tmp_path / "a"), tmp_path / "b", num_landmarks=20))
    assert done.left_behind == ()
    ids = draw_batch(1)[0][:1]
    assert_close(EncoderForMaskedLM.from_pretrained(tmp_path / "b")(ids).logits, source(ids).logits, **LOGITS)


def test_names_of_old_checkpoints_are_read(tmp_path):
    source = make(BertModel)
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor.clone()
        for name, tensor in source.state_dict().items()
    }
    tensors["embeddings.position_ids"] = torch.arange(POSITIONS)[None]
    save(source, tmp_path / "a")
    save_file({f"bert.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "a" / "model.safetensors")
    convert(ConvertOptions(tmp_path / "a", tmp_path / "b", num_landmarks=20))
    ids = draw_batch(0)[0]
    came = EncoderModel.from_pretrained(tmp_path / "b")(ids).last_hidden_state
    assert_close(came, source(ids).last_hidden_state, **HIDDEN)


def test_a_checkpoint_in_several_files_and_in_half_precision_is_read(tmp_path):
    source = make(BertModel).bfloat16()
    source.save_pretrained(tmp_path / "a", max_shard_size="2KB")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    convert(ConvertOptions(tmp_path / "a", tmp_path / "b", num_landmarks=20))
    ours, stored = EncoderModel.from_pretrained(tmp_path / "b"), source.state_dict()
    assert ours.dtype == torch.bfloat16
    for name, tensor in ours.state_dict().items():
        if name in stored and "position" not in name:
            assert_close(tensor, stored[name], rtol=0, atol=0)


@pytest.mark.parametrize("kind", [BertModel, RobertaModel])
def test_positions_repeat_block_after_block(kind, tmp_path):
    source = make(kind)
    longer = {"max_position_embeddings": 60, "stretch": "repeat"}
    done = convert(ConvertOptions(save(source, tmp_path / "a"), tmp_path / "b", num_landmarks=20, **longer))
    assert done.num_positions == (POSITIONS, 60)
    ours, ids = EncoderModel.from_pretrained(tmp_path / "b"), draw_batch(0)[0]
    table = ours.embeddings.position_embeddings.weight[2:]
    trained = source.embeddings.position_embeddings.weight[-POSITIONS:]
    assert_close(table, trained.repeat(3, 1)[:60], rtol=0, atol=0)
    # The first tokens see the same positions as before.
    assert_close(ours(ids).last_hidden_state, source(ids).last_hidden_state, **HIDDEN)
    assert ours(torch.randint(0, 31, (1, 60))).last_hidden_state.isfinite().all()


def test_interpolated_positions_lie_between_the_trained_ones(tmp_path):
    source = make(BertModel)
    trained = torch.arange(24.0)[:, None] * torch.arange(1.0, 17.0)
    source.embeddings.position_embeddings.weight.data = trained
    convert(ConvertOptions(save(source, tmp_path / "a"), tmp_path / "b", max_position_embeddings=93))
    table = EncoderModel.from_pretrained(tmp_path / "b").embeddings.position_embeddings.weight[2:]
    # A straight line stays straight, with its ends in place. float32 rounding of numbers up to 368.
    wanted = torch.linspace(0, 23, 93)[:, None] * torch.arange(1.0, 17.0)
    assert_close(table, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("stretch", ["interpolate", "repeat"])
def test_fewer_positions_are_the_first_ones(stretch, tmp_path):
    source = make(BertModel)
    convert(ConvertOptions(save(source, tmp_path / "a"), tmp_path / "b", max_position_embeddings=7, stretch=stretch))
    table = EncoderModel.from_pretrained(tmp_path / "b").embeddings.position_embeddings.weight[2:]
    assert_close(table, source.embeddings.position_embeddings.weight[:7], rtol=0, atol=0)


@pytest.mark.parametrize("kind", [EncoderModel, EncoderForMaskedLM, EncoderForPreTraining])
def test_a_model_of_this_library_takes_longer_inputs(kind, tmp_path):
    torch.manual_seed(0)
    options = {"attention": "nystrom", "attention_options": {"num_landmarks": 4, "pinv_steps": 8}}
    source = kind(EncoderConfig(**BERT, **options, conv_kernel_size=3, norm="pre")).eval()
    done = convert(
        ConvertOptions(save(source, tmp_path / "a"), tmp_path / "b", max_position_embeddings=50, stretch="repeat")
    )
    ours, ids = kind.from_pretrained(tmp_path / "b"), draw_batch(0)[0]
    assert_close(ours(ids)[0], source(ids)[0], rtol=0, atol=0)
    assert ours.config.max_position_embeddings == 50
    assert ours(torch.randint(0, 31, (1, 50)))[0].shape[1] == 50
    assert (done.left_behind, done.started) == ((), ())
    convert(ConvertOptions(tmp_path / "a", tmp_path / "c", num_landmarks=6))
    assert EncoderModel.from_pretrained(tmp_path / "c").config.attention_options == {
        "num_landmarks": 6,
        "pinv_steps": 8,
    }


def test_a_published_nystromformer_takes_longer_inputs_and_stays_published(tmp_path):
    torch.manual_seed(0)
    config = NystromformerConfig(**BERT, num_landmarks=8, segment_means_seq_len=8, conv_kernel_size=5)
    source = NystromformerForMaskedLM(config).eval()
    convert(ConvertOptions(save(source, tmp_path / "a"), tmp_path / "b", max_position_embeddings=50, stretch="repeat"))
    theirs = NystromformerForMaskedLM.from_pretrained(tmp_path / "b")
    ours, ids = EncoderForMaskedLM.from_pretrained(tmp_path / "b"), draw_batch(0)[0]
    assert theirs.config.max_position_embeddings == ours.config.max_position_embeddings == 50
    for model in (theirs, ours):
        assert_close(model(ids).logits, source(ids).logits, **LOGITS)
    convert(ConvertOptions(tmp_path / "a", tmp_path / "c", num_landmarks=6))
    landmarks = EncoderForMaskedLM.from_pretrained(tmp_path / "c")
    assert (landmarks.config.attention, landmarks.config.attention_options["num_landmarks"]) == ("nystrom", 6)


def test_published_sentence_order_is_kept(tmp_path):
    source = EncoderForPreTraining(
        EncoderConfig(**BERT, attention="softmax", conv_kernel_size=3, pooling="first", segment_means_seq_len=8)
    ).eval()
    convert(ConvertOptions(save(source, tmp_path / "a"), tmp_path / "b", max_position_embeddings=50, stretch="repeat"))
    ours, ids = EncoderForPreTraining.from_pretrained(tmp_path / "b"), draw_batch(0)[0]
    assert_close(ours(ids).to_tuple(), source(ids).to_tuple(), **LOGITS)


def make_tokenizer(folder):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *["the", "cat", "sat", "on", "a", "mat", "and", "slept"]]
    tokenizer = BertTokenizer(vocab={word: place for place, word in enumerate(words)}, model_max_length=POSITIONS)
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("settings", ["kept", "without a class", "none"])
def test_the_tokenizer_comes_along_and_cuts_at_the_new_length(settings, tmp_path):
    save(make(BertModel), tmp_path / "a")
    theirs, path = make_tokenizer(tmp_path / "a"), tmp_path / "a" / "tokenizer_config.json"
    if settings == "none":
        path.unlink()
    elif settings == "without a class":
        path.write_text(json.dumps({"do_lower_case": True}))
    convert(ConvertOptions(tmp_path / "a", tmp_path / "b", max_position_embeddings=40))
    ours = AutoTokenizer.from_pretrained(tmp_path / "b")
    assert ours("The cat sat on a mat") == theirs("The cat sat on a mat")
    assert ours.model_max_length == 40
    assert len(ours("the cat " * 50, truncation=True).input_ids) == 40


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'; expected 'absolute'"),
        ({"is_decoder": True}, "is_decoder = True"),
        ({"add_cross_attention": True}, "add_cross_attention = True"),
        ({"chunk_size_feed_forward": 4}, "chunk_size_feed_forward = 4"),
        ({"hidden_act": "gulu"}, "hidden_act 'gulu' is unknown"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"quantization_config": {"load_in_8bit": True}}, "quantization_config"),
        ({"model_type": "deberta"}, "model of type 'deberta'; expected one of bert, roberta"),
        ({"model_type": None}, "model of type None"),
        ({"hidden_size": "wide"}, "not a valid configuration of bert"),
        ({"max_position_embeddings": 30}, "24 rows in its position table.*max_position_embeddings = 30"),
        ({"intermediate_size": 40}, r"intermediate.dense.bias of shape \(20,\); expected \(40,\)"),
        ({"num_hidden_layers": 3}, r"lacks encoder.layer.2"),
        ({"num_hidden_layers": 1}, r"has encoder.layer.1.*which EncoderModel does not have"),
    ],
)
def test_a_source_that_cannot_be_represented_raises_and_nothing_is_written(changes, says, tmp_path):
    edit(save(make(BertModel), tmp_path / "a"), **changes)
    with pytest.raises(ValueError, match=says):
        convert(ConvertOptions(tmp_path / "a", tmp_path / "b"))
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("encoder.layer.0.crossattention.self.query.weight", torch.zeros(16, 16), "crossattention.*has no counterpart"),
        ("encoder.layer.0.attention.self.distance_embedding.weight", torch.zeros(9, 8), "distance_embedding"),
        ("embeddings.LayerNorm.gamma", torch.zeros(16), "LayerNorm.weight twice"),
        ("encoder.layer.0.output.dense.weight", torch.zeros(16, 20, dtype=torch.int8), "torch.int8"),
    ],
)
def test_a_tensor_that_would_change_the_result_raises(name, tensor, says, tmp_path):
    source = make(BertModel)
    save(source, tmp_path / "a")
    tensors = {key: value.clone() for key, value in source.state_dict().items()} | {name: tensor}
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    with pytest.raises(ValueError, match=says):
        convert(ConvertOptions(tmp_path / "a", tmp_path / "b"))


def test_a_pickle_is_never_opened(tmp_path):
    source = save(make(BertModel), tmp_path / "a")
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    with pytest.raises(ValueError, match=r"pytorch_model.bin.*save_pretrained"):
        convert(ConvertOptions(source, tmp_path / "b"))
    assert not (tmp_path / "opened").exists()


def test_a_file_that_is_cut_off_leaves_nothing_behind(tmp_path):
    path = save(make(BertModel), tmp_path / "a") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is truncated"):
        convert(ConvertOptions(tmp_path / "a", tmp_path / "b"))
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


def test_nothing_is_overwritten(tmp_path):
    save(make(BertModel), tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("mine")
    (tmp_path / "c").write_text("mine")
    for to in ("b", "c"):
        with pytest.raises(ValueError, match=rf"{to} is (not empty|a file)"):
            convert(ConvertOptions(tmp_path / "a", tmp_path / to))
    (tmp_path / "d").mkdir()
    assert convert(ConvertOptions(tmp_path / "a", tmp_path / "d")).folder == tmp_path / "d"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c", "d"}


def test_nothing_half_written_stays(tmp_path, monkeypatch):
    save(make(BertModel), tmp_path / "a")

    def fail(*args, **kwargs):
        raise OSError("the disk is full")

    monkeypatch.setattr("nystrom.integrations.convert.copy_tokenizer", fail)
    with pytest.raises(OSError, match="disk is full"):
        convert(ConvertOptions(tmp_path / "a", tmp_path / "b"))
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_landmarks": 0}, "num_landmarks is 0"),
        ({"attention": "near_fra"}, "attention method 'near_fra' is unknown"),
        ({"attention": "near_far", "num_landmarks": 8}, "option of near_far 'num_landmarks' is unknown"),
        ({"attention": "near_far", "options": {"pinv": "exact"}}, "option of near_far 'pinv' is unknown"),
        ({"options": {"block_size": 8}}, "option of nystrom 'block_size' is unknown"),
        (
            {"options": {"num_landmarks": 8}, "num_landmarks": 9},
            "num_landmarks is 9, and options also have num_landmarks",
        ),
        ({"attention": "linformer"}, "attention is 'linformer', which has learned weights"),
        ({"attention": "performer"}, "attention is 'performer', which has learned weights"),
        (
            {"attention": "near_far", "plan": "p.json"},
            "plan sets the method of each layer, and attention or its",
        ),
        ({"options": {"block_size": 8}, "plan": "p.json"}, "plan sets the method of each layer, and attention or its"),
        ({"conv_kernel_size": 4}, "conv_kernel_size is 4"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"stretch": "longer"}, "stretch is 'longer'"),
    ],
)
@pytest.mark.refuses
def test_wrong_options_raise_by_name(options, says, tmp_path):
    save(make(BertModel), tmp_path / "a")
    with pytest.raises(ValueError, match=says):
        convert(ConvertOptions(tmp_path / "a", tmp_path / "b", **options))
    assert not (tmp_path / "b").exists()


def states(model, pad=0):
    ids, mask = draw_batch(pad)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("near_far", {"block_size": 4, "reach": 1, "num_heavy": 2, "num_clusters": 2, "exact_up_to": 0}),
        ("skyformer_softmax", {"num_landmarks": 3}),
        ("reformer", {"num_hashes": 1, "chunk_size": 4, "num_buckets": 2}),
    ],
)
def test_another_method_is_that_of_set_attention_saved_with_the_model(method, options, tmp_path):
    source = make(BertModel)
    save(source, tmp_path / "a")
    exact = states(source)
    convert(ConvertOptions(tmp_path / "a", tmp_path / "b", attention=method, options=options))
    model = EncoderModel.from_pretrained(tmp_path / "b").eval()
    assert (model.config.attention, model.config.conv_kernel_size) == (method, None)
    assert options.items() <= model.config.attention_options.items()
    set_attention(source, method, options)
    expected = states(source)
    assert (expected - exact).norm() > 0.01 * exact.norm()
    # float32, through two layers with norms
    assert_close(states(model), expected, rtol=1e-4, atol=1e-5)


def test_a_model_of_this_library_gets_another_method_too(tmp_path):
    torch.manual_seed(0)
    save(EncoderModel(EncoderConfig(**BERT, conv_kernel_size=3)).eval(), tmp_path / "a")
    convert(ConvertOptions(tmp_path / "a", tmp_path / "b", attention="near_far", options={"block_size": 4}))
    convert(ConvertOptions(tmp_path / "b", tmp_path / "c", options={"num_heavy": 2}))
    model = EncoderModel.from_pretrained(tmp_path / "c")
    assert (model.config.attention, model.config.conv_kernel_size) == ("near_far", 3)
    sizes = near_far_sizes(BERT["max_position_embeddings"], selects=False) | {"block_size": 4}
    assert model.config.attention_options == sizes | {"num_heavy": 2}
    convert(ConvertOptions(tmp_path / "a", tmp_path / "long", attention="near_far", max_position_embeddings=2048))
    assert EncoderModel.from_pretrained(tmp_path / "long").config.attention_options == near_far_sizes(
        2048, selects=False
    )
    # Sizes that it was trained with stay.
    convert(ConvertOptions(tmp_path / "long", tmp_path / "longer", attention="near_far", max_position_embeddings=4096))
    assert EncoderModel.from_pretrained(tmp_path / "longer").config.attention_options == near_far_sizes(
        2048, selects=False
    )
    save(EncoderModel(EncoderConfig(**BERT, attention="linformer")), tmp_path / "d")
    with pytest.raises(ValueError, match=r"the attention of .* is 'linformer', which has learned weights"):
        convert(ConvertOptions(tmp_path / "d", tmp_path / "e", attention="near_far"))


@pytest.mark.refuses
def test_a_model_without_attention_gets_none(tmp_path):
    save(EncoderModel(EncoderConfig(**BERT, attention="none", conv_kernel_size=3)), tmp_path / "a")
    with pytest.raises(ValueError, match="is a model without attention, which has neither queries nor keys"):
        convert(ConvertOptions(tmp_path / "a", tmp_path / "b", attention="near_far"))


def test_the_token_of_the_class_keeps_its_position(tmp_path):
    torch.manual_seed(0)
    source = EncoderForSequenceClassification(EncoderConfig(**BERT, pooling="cls", attention="softmax")).eval()
    save(source, tmp_path / "a")
    convert(ConvertOptions(tmp_path / "a", tmp_path / "b", max_position_embeddings=50, stretch="repeat"))
    convert(ConvertOptions(tmp_path / "a", tmp_path / "c", attention="nystrom", options={"num_landmarks": 30}))
    ids = draw_batch(0)[0]
    for name in ("b", "c"):
        ours = EncoderForSequenceClassification.from_pretrained(tmp_path / name)
        # A landmark for each token is exact attention.
        assert_close(ours(ids).logits, source(ids).logits, **LOGITS)
    longer = EncoderForSequenceClassification.from_pretrained(tmp_path / "b")
    assert longer(torch.zeros(1, 50, dtype=torch.long)).logits.isfinite().all()


def test_buffers_that_older_versions_saved_are_left_out(tmp_path):
    torch.manual_seed(0)
    config = NystromformerConfig(**BERT, num_landmarks=8, segment_means_seq_len=8, conv_kernel_size=5)
    source = NystromformerForMaskedLM(config).eval()
    save(source, tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors["nystromformer.embeddings.position_ids"] = torch.arange(24)[None] + 2
    save_file(tensors, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    convert(ConvertOptions(tmp_path / "a", tmp_path / "b", max_position_embeddings=50, stretch="repeat"))
    ids = draw_batch(0)[0]
    assert_close(EncoderForMaskedLM.from_pretrained(tmp_path / "b")(ids).logits, source(ids).logits, **LOGITS)


def test_a_nystromformer_with_two_decoders_raises(tmp_path):
    torch.manual_seed(0)
    source = EncoderForMaskedLM(EncoderConfig(**BERT))
    save(source, tmp_path / "a")
    tensors = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    tensors["cls.predictions.decoder.weight"] += 1
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    with pytest.raises(ValueError, match=r"different values for cls.predictions.decoder.weight"):
        convert(ConvertOptions(tmp_path / "a", tmp_path / "b", max_position_embeddings=50))


def test_a_nystromformer_keeps_its_convolution(tmp_path):
    torch.manual_seed(0)
    save(EncoderModel(EncoderConfig(**BERT, conv_kernel_size=3)), tmp_path / "a")
    with pytest.raises(ValueError, match=r"conv_kernel_size is 5 but .* was trained with 3"):
        convert(ConvertOptions(tmp_path / "a", tmp_path / "b", conv_kernel_size=5))


def test_drawing_start_values_leaves_the_generator_alone(tmp_path):
    save(make(BertModel), tmp_path / "a")
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    convert(ConvertOptions(tmp_path / "a", tmp_path / "b"))
    assert_close(torch.rand(3), wanted, rtol=0, atol=0)


def test_the_card_says_what_to_import_unless_transformers_knows_the_format(tmp_path):
    convert(ConvertOptions(save(make(BertModel), tmp_path / "a"), tmp_path / "b"))
    assert "`import nystrom.integrations` first" in (tmp_path / "b" / "README.md").read_text()
    published = NystromformerConfig(**BERT, num_landmarks=8, segment_means_seq_len=8)
    convert(
        ConvertOptions(
            save(NystromformerForMaskedLM(published), tmp_path / "c"), tmp_path / "d", max_position_embeddings=50
        )
    )
    assert not (tmp_path / "d" / "README.md").exists()


def make_sentence_model(folder, pooling="1_Pooling"):
    """The files of a model of sentence-transformers around a BERT; its norm has no folder, as in published ones."""
    save(make(BertModel), folder)
    make_tokenizer(folder)
    places = ["", pooling, "2_Normalize"]
    (folder / "modules.json").write_text(json.dumps([{"idx": i, "path": place} for i, place in enumerate(places)]))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8, "do_lower_case": False}))
    if pooling == "1_Pooling":
        (folder / pooling).mkdir()
        (folder / pooling / "config.json").write_text('{"word_embedding_dimension": 16}')
    return folder


def test_a_model_of_sentence_transformers_stays_one(tmp_path):
    source = make_sentence_model(tmp_path / "a")
    done = convert(ConvertOptions(source, tmp_path / "b", max_position_embeddings=40, stretch="repeat"))
    assert done.modules == ("modules.json", "sentence_bert_config.json", "1_Pooling")
    for name in ("modules.json", "1_Pooling/config.json"):
        assert (tmp_path / "b" / name).read_bytes() == (source / name).read_bytes()
    settings = json.loads((tmp_path / "b" / "sentence_bert_config.json").read_text())
    assert settings == {"max_seq_length": 40, "do_lower_case": False}
    assert "import nystrom.integrations" in str(done)


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("modules", "says"),
    [
        ('[{"path": ""}, {"path": "../elsewhere"}]', "names the module '../elsewhere'; expected a folder inside"),
        ('[{"path": "0_Transformer"}]', "has its encoder in '0_Transformer'; expected it beside this file"),
        ('[{"name": "0"}]', "is not a list of modules with a path each"),
        ("[]", "lists no modules"),
        ("{", "modules.json is not valid JSON"),
        ('["0"]', "is not a list of modules with a path each"),
    ],
)
def test_a_list_of_modules_that_cannot_be_followed_raises(tmp_path, modules, says):
    source = make_sentence_model(tmp_path / "a")
    (source / "modules.json").write_text(modules)
    with pytest.raises(ValueError, match=re.escape(says)):
        convert(ConvertOptions(source, tmp_path / "b"))
    assert not (tmp_path / "b").exists()


def test_a_link_inside_a_module_is_copied_as_its_content_within_the_folder_or_the_hubs_cache_alone(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    for folder in (snapshot / "1_Pooling" / "deep", snapshot.parents[1] / "blobs", tmp_path / "to"):
        folder.mkdir(parents=True)
    (snapshot / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_Pooling"}]))
    (snapshot / "mine").write_text("mine")
    (snapshot.parents[1] / "blobs" / "ab").write_text("content")
    (snapshot / "1_Pooling" / "deep" / "config.json").symlink_to("../../../../blobs/ab")
    (snapshot / "1_Pooling" / "inner").symlink_to("../mine")
    copy_sentence_modules(snapshot, tmp_path / "to", max_length=8)
    copies = [tmp_path / "to" / "1_Pooling" / name for name in ("deep/config.json", "inner")]
    assert [(copy.read_text(), copy.is_symlink()) for copy in copies] == [("content", False), ("mine", False)]
    (tmp_path / "secret").write_text("secret")
    for i, target in enumerate(("../../../../secret", str(tmp_path / "secret"), ".", "../1_Pooling/deep")):
        (to := tmp_path / f"to{i}").mkdir()
        (snapshot / "1_Pooling" / "link").symlink_to(target)
        with pytest.raises(
            ValueError, match=rf"1_Pooling/link is a link to {target}; expected a file inside .*: put a"
        ):
            copy_sentence_modules(snapshot, to, max_length=8)
        (snapshot / "1_Pooling" / "link").unlink()
        assert not (to / "1_Pooling" / "link").exists()
