"""Designs and the token of the class are what the codes of the papers and of the Long Range Arena say."""

import json
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from nystrom import Alibi, softmax_attention
from nystrom.attention.options import SoftmaxOptions
from nystrom.models import EncoderConfig, EncoderForMaskedLM, EncoderForSequenceClassification, EncoderModel
from nystrom.models.heads.pairs import EncoderForPairClassification
from nystrom.models.parts.dropped_weights import DroppedWeights
from nystrom.parallel.models import parallelize

SMALL: dict[str, Any] = {
    "vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 12, "type_vocab_size": 1, "norm": "pre", "num_labels": 3, "attention": "softmax",
    "pad_token_id": 0,
}  # fmt: skip


def make(kind: Any = EncoderForSequenceClassification, **changes: Any) -> Any:
    torch.manual_seed(0)
    return kind(EncoderConfig(**(SMALL | changes)))


def count(model):
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("design", ["transformers", "authors", "official"])
@pytest.mark.parametrize("attention_size", [None, 8])
def test_the_parameters_are_those_of_the_layers(design, attention_size):
    model = make(design=design, attention_size=attention_size, pooling="cls")
    w, f, a, head = 16, 24, attention_size or 16, 16 if design == "transformers" else 24
    # The table of positions has two rows before the first token, and one for that of the class.
    embeddings = 30 * w + (12 + 2 + 1) * w + w + w
    layer = 3 * (w * a + a) + (a * w + w) + (w * f + f) + (f * w + w) + 4 * w
    assert count(model) == embeddings + 2 * layer + 2 * w + (w * head + head) + (head * 3 + 3)


def test_the_authors_start_linear_layers_as_torch_does_and_words_at_two_hundredths():
    model = make(design="authors", vocab_size=2_000, max_position_embeddings=2_000, initializer_range=0.3)
    embeddings = model.nystromformer.embeddings
    for table in (embeddings.word_embeddings, embeddings.position_embeddings):
        # 32,000 normal numbers: a standard deviation is known to half a percent.
        assert table.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert embeddings.token_type_embeddings.weight.abs().max() == 0
    assert embeddings.word_embeddings.weight[0].abs().max() == 0
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            bound = layer.in_features**-0.5
            for values in (layer.weight, layer.bias):
                assert 0.7 * bound < values.abs().max() <= bound, name


def test_the_official_code_starts_by_xavier_and_words_at_one():
    model = make(
        design="official", vocab_size=2_000, max_position_embeddings=2_000, initializer_range=0.3, pooling="cls"
    )
    embeddings = model.nystromformer.embeddings
    assert embeddings.word_embeddings.weight.std().item() == pytest.approx(1.0, rel=0.02)
    assert embeddings.position_embeddings.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert embeddings.cls.abs().max() == 0
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            bound = (6 / (layer.in_features + layer.out_features)) ** 0.5
            assert 0.7 * bound < layer.weight.abs().max() <= bound, name
            assert layer.bias.abs().max() == 0, name


@pytest.mark.parametrize("design", ["authors", "official"])
def test_the_head_is_relu_without_dropout_and_the_feed_forward_block_drops(design):
    model = make(design=design, hidden_dropout_prob=0.5).train()
    x = torch.randn(4, 16)
    head = model.classifier
    assert_close(head(x), head.out_proj(torch.relu(head.dense(x))))
    inside = model.nystromformer.encoder.layer[0].intermediate
    share = (inside(torch.randn(50, 40, 16)) == 0).float().mean().item()
    # 48,000 draws: five standard deviations are about .012.
    assert share == pytest.approx(0.5, abs=0.012)
    as_published = make(hidden_dropout_prob=0.5).train().nystromformer.encoder.layer[0].intermediate
    assert (as_published(torch.randn(50, 40, 16)) == 0).float().mean() < 0.01


AUTHORS = {"design": "authors", "attention_probs_dropout_prob": 0.5}


@pytest.mark.parametrize("attention", ["softmax", "kernelized"])
def test_the_authors_drop_the_weights_in_training_alone(attention):
    name, options = attention, {"attention": attention, "attention_options": {}}
    attention = make(**AUTHORS, **options).nystromformer.encoder.layer[0].attention.self.method
    q, k, eye = torch.randn(40, 2, 30, 8), torch.randn(40, 2, 30, 8), torch.eye(30).expand(40, 2, 30, 30)
    keep = torch.arange(30) < torch.tensor([[20], [30]]).repeat(20, 1)
    if name == "softmax":
        weights = (q @ k.mT / 8**0.5).masked_fill(~keep[:, None, None, :], -torch.inf).softmax(dim=-1)
    else:
        weights = torch.exp(-0.5 * torch.cdist(q, k).square() / 8**0.5)
    # Values that are the identity show the weights themselves.
    found = attention.train()(q, k, eye, keep=keep)
    kept = found != 0
    real = (keep[:, None, :, None] & keep[:, None, None, :]).expand_as(found)
    assert not kept[~real].any()
    # 52,000 draws: five standard deviations are about .011.
    assert kept[real].double().mean().item() == pytest.approx(0.5, abs=0.011)
    assert_close(found[kept], 2 * weights[kept])
    assert_close(attention.eval()(q, k, eye, keep=keep), torch.where(real, weights, 0.0))
    # The convolution of the values is added to what is left, and is not dropped itself.
    skip, still = torch.rand(2, 1, 3, 1), make(design="authors", **options)
    still = still.nystromformer.encoder.layer[0].attention.self.method
    torch.manual_seed(1)
    convolved = attention.train()(q, k, eye, keep=keep, skip=skip)
    torch.manual_seed(1)
    added = still(q, k, eye, keep=keep, skip=skip) - still(q, k, eye, keep=keep)
    # float32 rounding of sums in another order
    assert_close(convolved - attention(q, k, eye, keep=keep), added, rtol=0, atol=1e-5)


def test_a_model_that_drops_weights_has_the_weights_and_the_output_of_one_that_does_not(tmp_path):
    plain, dropped = make(design="authors").eval(), make(**AUTHORS).eval()
    assert_close(dropped.state_dict(), plain.state_dict(), rtol=0, atol=0)
    ids = torch.randint(1, 30, (2, 7))
    assert_close(dropped(ids).logits, plain(ids).logits, rtol=0, atol=0)
    dropped.save_pretrained(tmp_path)
    again = EncoderForSequenceClassification.from_pretrained(tmp_path)
    assert again.config.attention_probs_dropout_prob == 0.5
    with pytest.raises(ValueError, match=r"a DroppedWeights, which does not work over ranks"):
        parallelize(dropped.nystromformer, None)


def test_weights_with_a_bias_of_positions_are_not_dropped():
    heads, x = DroppedWeights("softmax", SoftmaxOptions(), 2, 4, share=0.5), torch.randn(1, 2, 9, 4)
    bias = Alibi(torch.ones(2))
    assert torch.equal(heads.eval()(x, x, x, bias=bias), softmax_attention(x, x, x, bias=bias))
    with pytest.raises(ValueError, match=r"bias is given, and attention_probs_dropout_prob is 0\.5"):
        heads.train()(x, x, x, bias=bias)


LINFORMER = {"attention": "linformer", "attention_options": {"num_features": 4, "max_length": 12}}


def projections(model):
    return {name: weight for name, weight in model.named_parameters() if "_projection" in name}


@pytest.mark.parametrize("design", ["transformers", "authors", "official"])
@pytest.mark.parametrize("frozen", [False, True])
def test_linformers_projections_are_frozen_where_its_options_say_so(design, frozen):
    model = make(
        design=design, attention="linformer", attention_options=LINFORMER["attention_options"] | {"frozen": frozen}
    )
    model(torch.ones(2, 7, dtype=torch.long)).logits.sum().backward()
    found = projections(model)
    assert len(found) == 4
    assert {weight.requires_grad for weight in found.values()} == {not frozen}
    assert all((weight.grad is None) == frozen for weight in found.values())
    assert all(weight.requires_grad for name, weight in model.named_parameters() if name not in found)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_folder_says_whether_the_projections_are_frozen_and_an_old_one_that_they_were(tmp_path, frozen, shared):
    options = LINFORMER["attention_options"] | {"frozen": frozen}
    changes = {"design": "authors", "attention": "linformer", "share_attention_weights": shared}
    model = make(attention_options=options, **changes).eval()
    model.save_pretrained(tmp_path)
    again = EncoderForSequenceClassification.from_pretrained(tmp_path)
    from_state = EncoderForSequenceClassification.from_pretrained(
        None, config=again.config, state_dict=model.state_dict()
    )
    for each in (again, from_state):
        assert {weight.requires_grad for weight in projections(each).values()} == {not frozen}
    # Files from before the option have no field: the design froze the projections.
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    del content["attention_options"]["frozen"]
    file.write_text(json.dumps(content))
    old = EncoderForSequenceClassification.from_pretrained(tmp_path)
    assert len(projections(old)) == (2 if shared else 4)
    assert not any(weight.requires_grad for weight in projections(old).values())
    ids = torch.randint(1, 30, (2, 7))
    assert_close(old(ids).logits, model(ids).logits, rtol=0, atol=0)
    # It may be trained on, and other designs had learned ones.
    asked = EncoderConfig.from_pretrained(tmp_path, attention_options={"frozen": False})
    assert asked.attention_options["frozen"] is False
    assert "frozen" not in EncoderConfig.from_dict(content | {"design": "official"}).attention_options


def test_the_token_of_the_class_is_a_word_before_the_others():
    model = make(pooling="cls").eval()
    plain = make(pooling="first", max_position_embeddings=13).eval()
    cls = torch.nn.init.normal_(model.nystromformer.embeddings.cls)
    state = {name: weight for name, weight in model.state_dict().items() if not name.endswith("embeddings.cls")}
    plain.load_state_dict(state)
    ids = torch.randint(1, 30, (3, 12))
    words = torch.cat([cls.expand(3, 1, 16), plain.get_input_embeddings()(ids)], dim=1)
    assert_close(model(ids).logits, plain(inputs_embeds=words).logits)
    assert model.nystromformer(ids).last_hidden_state.shape == (3, 13, 16)


@pytest.mark.parametrize("attention", ["softmax", "nystrom", "longformer"])
def test_padding_at_either_end_changes_nothing_with_the_token_of_the_class(attention):
    options = {"nystrom": {"num_landmarks": 4}, "longformer": {"window": 3}}.get(attention, {})
    model = make(pooling="cls", attention=attention, attention_options=options, conv_kernel_size=3).eval()
    torch.nn.init.normal_(model.nystromformer.embeddings.cls)
    ids = torch.randint(1, 30, (2, 7))
    wanted = model(ids).logits
    for left in (0, 2, 5):
        padded = torch.zeros(2, 12, dtype=torch.long)
        padded[:, left : left + 7] = ids
        mask = torch.zeros(2, 12).bool()
        mask[:, left : left + 7] = True
        types = torch.zeros(2, 12, dtype=torch.long)
        # float32 rounding of sums in another order
        assert_close(model(padded, mask, types).logits, wanted, rtol=1e-4, atol=1e-6)


def test_pairs_have_a_token_of_the_class_for_each_document():
    model = make(EncoderForPairClassification, pooling="cls", num_labels=2).eval()
    torch.nn.init.normal_(model.nystromformer.embeddings.cls)
    ids, mask = torch.randint(1, 30, (3, 2, 8)), torch.ones(3, 2, 8).bool()
    mask[:, 1, 5:] = False
    x = model.nystromformer(ids.flatten(0, 1), mask.flatten(0, 1)).last_hidden_state
    assert_close(model(ids, mask).logits, model.classifier(x[:, 0].unflatten(0, (3, 2))))


def test_a_saved_model_is_the_same_again(tmp_path):
    model = make(pooling="cls", design="official", attention_size=8).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1
    model.save_pretrained(tmp_path)
    again = EncoderForSequenceClassification.from_pretrained(tmp_path)
    assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert (again.config.design, again.config.attention_size, again.config.pooling) == ("official", 8, "cls")
    encoder = EncoderModel.from_pretrained(tmp_path)
    assert_close(encoder.state_dict(), model.nystromformer.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"design": "paper"}, "design is 'paper'; expected one of 'transformers', 'authors', 'official'"),
        (
            AUTHORS | {"attention": "performer"},
            "dropout_prob is 0.5, but performer of design 'authors' stores no weights",
        ),
        (AUTHORS | {"design": "official"}, "is 0.5, but softmax of design 'official' stores no weights"),
        (
            LINFORMER | {"design": "authors"},
            r"frozen is not given, .* pass attention_options={'frozen': False} for Nyströmformer's, .*Skyformer's",
        ),
        ({"attention_size": 7}, "attention_size is 7 but num_attention_heads is 2; expected a multiple of the heads"),
        ({"attention_size": 0}, "attention_size is 0; expected a whole number of at least 1"),
        (
            {
                "segment_means_seq_len": 12,
                "norm": "post",
                "pooling": "first",
                "conv_kernel_size": 3,
                "attention_size": 8,
            },
            "attention_size is 8, not None: transformers' own Nyströmformer cannot compute that",
        ),
    ],
)
def test_what_a_model_cannot_be_is_refused_by_name(changes, says):
    with pytest.raises(ValueError, match=says):
        make(**changes)


def test_what_has_no_place_for_the_token_of_the_class_refuses_it():
    with pytest.raises(ValueError, match=r"pooling is 'cls', .* EncoderForMaskedLM does not support"):
        make(EncoderForMaskedLM, pooling="cls")
    model, ids = make(pooling="cls"), torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="position_ids are given but pooling is 'cls'"):
        model(ids, position_ids=torch.arange(4)[None])
    with pytest.raises(ValueError, match="a EncoderEmbeddings, which does not work over ranks"):
        parallelize(model, None)
