"""A folder in the published format gives what transformers gives, and one that is saved in it is read there."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, NystromformerConfig, NystromformerForMaskedLM

import nystrom.integrations
import nystrom.models
from nystrom.models import EncoderConfig, EncoderForMaskedLM, EncoderForPreTraining, EncoderModel

HEADS = (
    *("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
    *("ForMultipleChoice", "ForQuestionAnswering"),
)
every_head = pytest.mark.parametrize("head", HEADS)
# Nyström attention, and what all published checkpoints have: as many landmarks as tokens, which is exact attention.
both_kinds = pytest.mark.parametrize("landmarks", [4, 16])
# float32 rounding through two layers and six iterations of the inverse, on logits of up to ten.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def load(head, folder, **changes):
    return getattr(nystrom.models, f"Encoder{head}").from_pretrained(folder, **changes)


def draw(head="ForMaskedLM", b=3, n=16, choices=1):
    shape = (b, choices, n) if head == "ForMultipleChoice" else (b, n)
    return torch.randint(0, 40, shape, generator=torch.Generator().manual_seed(1))


def logits(output):
    return torch.cat([value.flatten() for value in output.to_tuple()])


@every_head
@both_kinds
def test_each_sample_has_the_logits_of_transformers(published, head, landmarks):
    theirs, folder = published(head, num_landmarks=landmarks)
    ours, report = load(head, folder, output_loading_info=True)
    assert not any(report.values()), report
    for ids in draw(head).split(1):
        # Choices share a start value there, so one choice is one sample.
        expected = theirs(ids, attention_mask=torch.ones_like(ids))
        assert_close(logits(ours(ids)), logits(expected), **CLOSE)


@every_head
@both_kinds
def test_transformers_reads_what_is_saved(published, head, landmarks, tmp_path):
    theirs, folder = published(head, num_landmarks=landmarks)
    load(head, folder).save_pretrained(tmp_path / "ours", max_shard_size="20KB")
    again, report = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    assert_close(again.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    ids = draw(head)
    # The same weights, but their place in memory moves the last bits of a product.
    assert_close(logits(again(ids)), logits(theirs(ids)), rtol=1e-5, atol=1e-5)
    before, after = (json.loads((at / "config.json").read_text()) for at in (folder, tmp_path / "ours"))
    assert before | {"attention_probs_dropout_prob": 0.0} == after
    assert not any(load(head, tmp_path / "ours", output_loading_info=True)[1].values())


def test_state_dict_names_are_the_published_ones(published):
    for head in HEADS:
        theirs, folder = published(head)
        named = {name: weight.shape for name, weight in theirs.state_dict().items()}
        assert {name: weight.shape for name, weight in load(head, folder).state_dict().items()} == named


@both_kinds
def test_any_length_up_to_the_positions_and_padded_batches_work(published, landmarks):
    _, folder = published(num_landmarks=landmarks)
    model = EncoderForMaskedLM.from_pretrained(folder).double()
    lengths = (1, 3, 7, 15, 23, 40)
    rows = [draw(b=1, n=n) for n in lengths]
    ids, mask = torch.full((6, 40), 5), torch.zeros(6, 40, dtype=torch.long)
    for i, row in enumerate(rows):
        # At either end.
        place = slice(0, lengths[i]) if i % 2 else slice(40 - lengths[i], 40)
        ids[i, place], mask[i, place] = row[0], 1
    together = model(ids, attention_mask=mask).logits
    for i, row in enumerate(rows):
        # float64 rounding through an inverse whose condition is a few thousand.
        assert_close(together[i][mask[i].bool()], model(row).logits[0], rtol=1e-8, atol=1e-9)
    with pytest.raises(ValueError, match="holds 41 tokens"):
        model(draw(n=41))


def test_equal_numbers_mean_exact_attention_at_every_length(published):
    theirs, folder = published(num_landmarks=16, segment_means_seq_len=16)
    ours, ids = EncoderForMaskedLM.from_pretrained(folder), draw(n=31)
    assert (ours.config.attention, ours.config.conv_kernel_size) == ("softmax", 5)
    assert_close(ours(ids).logits, theirs(ids).logits, **CLOSE)


def test_the_number_of_landmarks_may_be_changed(published):
    theirs, folder = published()
    changed = EncoderForMaskedLM.from_pretrained(folder, attention_options={"num_landmarks": 8})
    assert changed.config.attention_options == {"num_landmarks": 8, "z0": "sequence"}
    for layer in theirs.nystromformer.encoder.layer:
        layer.attention.self.num_landmarks = 8
    config = EncoderConfig.from_pretrained(folder)
    config.attention_options["num_landmarks"] = 8
    by_config, ids = EncoderForMaskedLM.from_pretrained(folder, config=config), draw(b=1)
    for model in (changed, by_config):
        assert_close(model(ids).logits, theirs(ids).logits, **CLOSE)


def test_asking_for_landmarks_turns_exact_attention_into_nystrom(published, tmp_path):
    _, folder = published(num_landmarks=16)
    model = EncoderForMaskedLM.from_pretrained(
        folder, attention_options={"num_landmarks": 16}, segment_means_seq_len=None
    )
    assert (model.config.attention, model.config.attention_options["num_landmarks"]) == ("nystrom", 16)
    exact, ids = EncoderForMaskedLM.from_pretrained(folder), draw(b=1, n=33)
    assert_close(model(ids[:, :16]).logits, exact(ids[:, :16]).logits, **CLOSE)
    assert not torch.allclose(model(ids).logits, exact(ids).logits, atol=1e-2)
    # With the same number it would mean exact attention again to transformers.
    with pytest.raises(ValueError, match="num_landmarks is 16 as well, which means exact attention there"):
        EncoderForMaskedLM.from_pretrained(folder, attention_options={"num_landmarks": 16})
    model.save_pretrained(tmp_path / "own")
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_type"] == "nystrom"


@pytest.mark.refuses
def test_an_attention_by_name_on_their_class_names_the_way_out(published):
    _, folder = published("Model")
    with pytest.raises(ValueError, match=r"NystromformerModel has attention of its own.*EncoderModel.from_pretrained"):
        AutoModel.from_pretrained(folder, attn_implementation="nystrom")


@every_head
def test_a_batch_has_the_logits_of_transformers_with_the_start_value_of_the_authors(published, head):
    theirs, folder = published(head)
    ours, ids = load(head, folder, attention_options={"z0": "authors"}), draw(head, choices=3)
    assert_close(logits(ours(ids)), logits(theirs(ids, attention_mask=torch.ones_like(ids))), **CLOSE)


def test_a_neighbour_changes_nothing_here(published):
    theirs, folder = published()
    ours, ids = EncoderForMaskedLM.from_pretrained(folder).double(), draw(b=3)
    assert_close(ours(ids).logits[:1], ours(ids[:1]).logits, rtol=1e-8, atol=1e-9)
    assert not torch.allclose(theirs(ids).logits[:1], theirs(ids[:1]).logits, rtol=1e-3, atol=1e-3)


def test_auto_classes_give_their_class_for_their_folder_and_ours_for_ours(published, tmp_path):
    _, folder = published()
    assert type(AutoConfig.from_pretrained(folder)) is NystromformerConfig
    assert type(AutoModelForMaskedLM.from_pretrained(folder)) is NystromformerForMaskedLM
    EncoderForMaskedLM.from_pretrained(folder, segment_means_seq_len=None).save_pretrained(tmp_path / "own")
    assert type(AutoModelForMaskedLM.from_pretrained(tmp_path / "own")) is EncoderForMaskedLM
    assert type(AutoModel.from_pretrained(tmp_path / "own")) is EncoderModel


def test_a_model_for_pretraining_is_read_there_as_masked_lm(published, tmp_path):
    theirs, folder = published()
    EncoderForPreTraining.from_pretrained(folder).save_pretrained(tmp_path / "ours")
    again, report = NystromformerForMaskedLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert {name.split(".")[0] for name in report["unexpected_keys"]} == {"sop"}
    assert not report["missing_keys"]
    ids = draw()
    assert_close(again(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)
    assert again.config.architectures == ["NystromformerForMaskedLM"]


def test_buffers_that_old_versions_saved_are_left_aside(published):
    _, folder = published()
    weights = load_file(folder / "model.safetensors")
    weights["nystromformer.embeddings.position_ids"] = torch.arange(40)[None] + 2
    weights["nystromformer.embeddings.token_type_ids"] = torch.zeros(1, 40, dtype=torch.long)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _, report = EncoderForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())


def test_untied_words_stay_untied(published, tmp_path):
    theirs, folder = published(tie_word_embeddings=False)
    ours, ids = EncoderForMaskedLM.from_pretrained(folder), draw(b=1)
    assert ours.cls.predictions.decoder.weight is not ours.get_input_embeddings().weight
    assert_close(ours(ids).logits, theirs(ids).logits, **CLOSE)
    ours.save_pretrained(tmp_path / "ours")
    again, report = NystromformerForMaskedLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert_close(again(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)


def rewrite(folder, **changes):
    content = json.loads((folder / "config.json").read_text())
    content = {name: value for name, value in (content | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(content))


def test_what_a_file_leaves_out_has_the_default_of_transformers(published):
    theirs, folder = published(hidden_act="gelu_new", layer_norm_eps=1e-5, type_vocab_size=2)
    rewrite(folder, hidden_act="absent", layer_norm_eps="absent", pad_token_id="absent", tie_word_embeddings="absent")
    ours, ids = EncoderForMaskedLM.from_pretrained(folder), draw(b=1)
    assert ours.config.pad_token_id == 1
    assert_close(ours(ids).logits, theirs(ids).logits, **CLOSE)


def test_words_of_older_versions_are_understood(published):
    theirs, folder = published()
    old = {"torch_dtype": "float32", "use_cache": True, "gradient_checkpointing": False, "is_decoder": False}
    old |= {"position_embedding_type": "absolute", "inv_init_coeff_option": "original", "_name_or_path": "x"}
    rewrite(folder, dtype="absent", **old)
    ours, ids = EncoderForMaskedLM.from_pretrained(folder), draw(b=1)
    assert_close(ours(ids).logits, theirs(ids).logits, **CLOSE)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"norm": "pre"}, "holds 'norm', a field of this library's own format.*pass norm="),
        ({"attention_options": {}}, "holds 'attention_options', a field of this library's own format"),
        ({"transformers_weights": "x.bin"}, "holds 'transformers_weights', which cannot be an attribute"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"inv_coeff_init_option": "original"}, "inv_coeff_init_option is 'original'"),
        ({"num_landmarks": 0}, "num_landmarks is 0"),
        ({"segment_means_seq_len": "16"}, "segment_means_seq_len is '16'"),
        ({"num_landmarks": 5}, "num_landmarks is 5, which does not divide it.*segment_means_seq_len=None"),
        ({"num_landmarks": 32}, "num_landmarks is 32, which does not divide it"),
        ({"inv_coeff_init_option": True}, "z0 is 'paper', not 'sequence' or 'authors'.*segment_means_seq_len=None"),
        ({"conv_kernel_size": None}, "conv_kernel_size is None"),
        ({"conv_kernel_size": 4}, "conv_kernel_size is 4"),
        ({"hidden_size": 30}, "hidden_size is 30 but num_attention_heads is 4"),
        ({"hidden_act": "gulu"}, "hidden_act 'gulu' is unknown"),
        ({"pad_token_id": 40}, "pad_token_id is 40 but vocab_size is 40"),
        ({"num_labels": 5}, "num_labels is 5 but id2label names 3"),
    ],
)
def test_what_the_format_does_not_have_is_refused_by_name(published, wrong, says):
    _, folder = published()
    rewrite(folder, **wrong)
    with pytest.raises(ValueError, match=says):
        EncoderForMaskedLM.from_pretrained(folder)


def test_a_field_that_nobody_knows_is_kept_by_both_libraries(published, tmp_path):
    theirs, folder = published()
    rewrite(folder, corpus="wikipedia")
    ours, ids = EncoderForMaskedLM.from_pretrained(folder), draw(b=1)
    assert_close(ours(ids).logits, theirs(ids).logits, **CLOSE)
    ours.config.epochs = 3
    ours.save_pretrained(tmp_path / "ours")
    again = NystromformerForMaskedLM.from_pretrained(tmp_path / "ours")
    assert (again.config.corpus, again.config.epochs) == ("wikipedia", 3)
    again.save_pretrained(tmp_path / "again")
    assert EncoderForMaskedLM.from_pretrained(tmp_path / "again").config.epochs == 3


def test_what_only_transformers_cannot_compute_loads_for_this_library_alone(published):
    _, folder = published()
    for change in ({"num_landmarks": 5}, {"inv_coeff_init_option": True}):
        other = folder.with_name("other")
        shutil.copytree(folder, other, dirs_exist_ok=True)
        rewrite(other, **change)
        model = EncoderForMaskedLM.from_pretrained(other, segment_means_seq_len=None)
        assert model(draw(n=13)).logits.isfinite().all()
    assert model.config.attention_options["z0"] == "paper"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"norm": "pre"}, "norm is 'pre', not 'post'"),
        ({"pooling": "mean"}, "pooling is 'mean', not 'first'"),
        ({"conv_kernel_size": None}, "conv_kernel_size is None"),
        ({"attention": "skyformer", "attention_options": {}}, "attention is 'skyformer'"),
        ({"attention_options": {"num_landmarks": 4}}, "z0 is 'paper'"),
        ({"attention_options": {"num_landmarks": 4, "z0": "authors", "pinv": "ridge"}}, "pinv is 'ridge'"),
        ({"attention_options": {"num_landmarks": 4, "z0": "authors", "pinv_steps": 7}}, "pinv_steps is 7, not 6"),
        (
            {"attention_options": {"num_landmarks": 4, "z0": "authors", "landmarks": "uniform"}},
            "landmarks is 'uniform'",
        ),
        ({"attention_options": {"num_landmarks": 4, "z0": "authors", "scale": 1.0}}, "scale is 1.0"),
        ({"attention": "softmax", "attention_options": {"scale": 1.0}}, "scale is not None"),
        ({"segment_means_seq_len": 0}, "segment_means_seq_len is 0"),
    ],
)
def test_what_transformers_cannot_compute_is_not_written_in_its_format(wrong, says, tmp_path):
    options = {"num_landmarks": 4, "z0": "authors"}
    right = {"pooling": "first", "conv_kernel_size": 5, "attention_options": options, "segment_means_seq_len": 16}
    config = EncoderConfig(**right)
    with pytest.raises(ValueError, match=says):
        EncoderConfig(**(right | wrong))
    for name, value in wrong.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=says):
        config.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_a_configuration_of_either_format_comes_back(published, tmp_path):
    _, folder = published(bos_token_id=7, eos_token_id=[3, 4], pad_token_id=6, layer_norm_eps=1e-6)
    config = EncoderConfig.from_pretrained(folder, task="listops")
    config.save_pretrained(tmp_path / "again")
    again = EncoderConfig.from_pretrained(tmp_path / "again")
    assert again.to_diff_dict() == config.to_diff_dict()
    assert (again.bos_token_id, again.eos_token_id, again.pad_token_id, again.task) == (7, [3, 4], 6, "listops")
    theirs = NystromformerConfig.from_pretrained(tmp_path / "again")
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.num_landmarks) == (7, [3, 4], 4)
