"""Models to start from: what of them is kept, what is new, and which do not fit."""

import pytest
import torch
from torch.testing import assert_close
from transformers import BertConfig, BertForPreTraining

from nystrom.models import EncoderConfig
from nystrom.models.configuration import POSITION_OFFSET
from nystrom.models.heads.language import EncoderForPreTraining

TABLE = "nystromformer.embeddings.position_embeddings.weight"
# So small a learning rate changes nothing.
ONE_STEP = {"steps": 1, "warmup_steps": 0, "evaluate_every": 1, "learning_rate": 1e-30}


@pytest.fixture(scope="module")
def bert(tmp_path_factory, tokenizer):
    """A BERT with its tokenizer, of as many tokens as the data have."""
    folder = tmp_path_factory.mktemp("bert") / "model"
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    BertForPreTraining(BertConfig(vocab_size=12, max_position_embeddings=24, **sizes)).save_pretrained(folder)
    return tokenizer(folder)


def best(run):
    return EncoderForPreTraining.from_pretrained(run / "best")


def test_a_bert_keeps_its_weights_and_its_words(short_run, bert, tmp_path):
    exact = {"attention": "softmax", "options": {}, "conv_kernel_size": 0}
    model = best(short_run(tmp_path / "run", model=bert, **exact, **ONE_STEP))
    source = BertForPreTraining.from_pretrained(bert).eval()
    ids = torch.randint(5, 12, (2, 24))
    with torch.no_grad():
        found, wanted = model(ids).prediction_logits, source(ids).prediction_logits
    # float32 rounding over one layer.
    assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_exact_attention_becomes_nystrom_and_a_convolution_starts_at_zero(short_run, tmp_path):
    exact = short_run(tmp_path / "exact", attention="softmax", options={}, conv_kernel_size=0, steps=4)
    run = short_run(tmp_path / "run", model=exact / "best", options={"num_landmarks": 24}, **ONE_STEP)
    before, after = best(exact), best(run)
    assert (after.config.attention, after.config.conv_kernel_size) == ("nystrom", 3)
    [kernel] = [weight for name, weight in after.named_parameters() if "conv" in name]
    assert kernel.abs().max() < 1e-20
    ids = torch.randint(5, 12, (2, 24))
    with torch.no_grad():
        # With a landmark for each token the two are equal.
        assert_close(after(ids).prediction_logits, before(ids).prediction_logits, rtol=1e-4, atol=1e-5)
        assert_close(after(ids).sop_logits, before(ids).sop_logits, rtol=1e-4, atol=1e-5)


def test_a_model_keeps_its_attention_unless_another_is_named(short_run, unbroken, tmp_path):
    unnamed = {"attention": None, "options": {}, "conv_kernel_size": None}
    run = short_run(tmp_path / "run", model=unbroken / "best", **unnamed, **ONE_STEP)
    config = EncoderConfig.from_pretrained(run / "best")
    assert (config.attention, config.attention_options) == ("nystrom", {"num_landmarks": 8})
    assert config.conv_kernel_size == 3
    before = best(unbroken).state_dict()
    assert all(weight.equal(before[name]) for name, weight in best(run).state_dict().items())


@pytest.mark.long
def test_the_positions_of_a_longer_model_repeat(short_run, unbroken, tmp_path, capsys):
    sizes = dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"))
    run = short_run(tmp_path / "run", model=unbroken / "best", preset="longer", length=40, **ONE_STEP, **sizes)
    assert "positions 24 -> 40" in capsys.readouterr().out
    before, after = (best(folder).state_dict()[TABLE][POSITION_OFFSET:] for folder in (unbroken, run))
    assert (len(before), len(after)) == (24, 40)
    assert after.equal(torch.cat([before, before[:16]]))


@pytest.mark.long
def test_weights_of_an_attention_for_another_length_are_new(short_run, tmp_path, capsys):
    linformer = {"attention": "linformer", "options": {"num_features": 4}, "conv_kernel_size": 0}
    short = short_run(tmp_path / "short", steps=4, **linformer)
    capsys.readouterr()
    short_run(tmp_path / "long", **linformer | ONE_STEP, model=short / "best", preset="longer", length=40)
    assert "new weights of linformer attention" in capsys.readouterr().out


def test_a_model_that_does_not_fit_is_named(short_run, unbroken, prepare, tmp_path):
    other = ("ein", "zwei", "drei", "vier", "fünf", "sechs", ".")
    for name, words in (("other", other), ("more", (*other, "acht"))):
        (tmp_path / name).mkdir()
        prepare(tmp_path / name, words=words)
    for changes, message in (
        ({"length": 32}, "has 24 positions but instances have 32 tokens"),
        ({"hidden_size": 64}, "has hidden_size = 32 but you asked for 64"),
        ({"hidden_size": None}, "has hidden_size = 32 but preset demo has 256"),
        ({"data": tmp_path / "other" / "data"}, "tokens of another tokenizer"),
        ({"data": tmp_path / "more" / "data"}, "vocabulary of 13 tokens but model .* has 12"),
        ({"model": unbroken}, "name its best model"),
        ({"model": tmp_path}, "holds no model.safetensors"),
    ):
        with pytest.raises(ValueError, match=message):
            short_run(tmp_path / "run", **{"model": unbroken / "best"} | changes)
    assert not (tmp_path / "run").exists()


def test_a_model_without_a_tokenizer_needs_as_many_tokens_as_the_data(short_run, unbroken, tmp_path):
    best(unbroken).save_pretrained(tmp_path / "bare")
    short_run(tmp_path / "run", model=tmp_path / "bare", **ONE_STEP)
    config = EncoderConfig.from_pretrained(tmp_path / "bare")
    config.vocab_size = 20
    EncoderForPreTraining(config).save_pretrained(tmp_path / "wide")
    with pytest.raises(ValueError, match="no tokenizer to compare"):
        short_run(tmp_path / "other", model=tmp_path / "wide", **ONE_STEP)
