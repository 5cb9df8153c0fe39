"""A saved model comes back with its method, and one with exact attention as it was."""

import json

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModel, BertConfig, BertModel, SiglipConfig, SiglipModel, WhisperConfig, WhisperModel

from nystrom.integrations import check_attention, save_with_attention, set_attention


@pytest.fixture
def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    return BertModel(BertConfig(vocab_size=30, max_position_embeddings=40, initializer_range=0.3, **sizes)).eval()


def test_the_method_and_its_options_come_back(bert, tmp_path):
    ids = {"input_ids": torch.randint(30, (1, 30))}
    with torch.no_grad():
        exact = bert(**ids).last_hidden_state
        set_attention(bert, "nystrom", {"num_landmarks": 4})
        wanted = bert(**ids).last_hidden_state
        save_with_attention(bert, tmp_path / "kept")
        loaded = AutoModel.from_pretrained(tmp_path / "kept")
        assert_close(loaded(**ids).last_hidden_state, wanted, rtol=0, atol=0)
        assert not torch.allclose(wanted, exact, atol=1e-2)
    assert list(check_attention(loaded, ids).layers.values()) == [{"num_landmarks": 4}] * 2
    # Without save_with_attention the method is lost.
    bert.save_pretrained(tmp_path / "forgotten")
    assert AutoModel.from_pretrained(tmp_path / "forgotten").config._attn_implementation == "sdpa"


def test_the_card_says_what_to_import_and_a_card_of_the_user_stays(bert, tmp_path):
    set_attention(bert, "nystrom", {"num_landmarks": 4})
    save_with_attention(bert, tmp_path)
    assert "`import nystrom.integrations` first" in (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text("mine")
    save_with_attention(bert, tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_exact_attention_is_saved_as_transformers_does(bert, tmp_path):
    save_with_attention(bert, tmp_path / "one")
    assert not (tmp_path / "one" / "README.md").exists()
    bert.save_pretrained(tmp_path / "two")
    one, two = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "two"))
    assert one == two


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}


def whisper():
    config = WhisperConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=30, num_mel_bins=8, max_source_positions=20,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return WhisperModel(config)


def siglip():
    texts = SIZES | {"vocab_size": 30, "max_position_embeddings": 40}
    return SiglipModel(SiglipConfig(text_config=texts, vision_config=SIZES | {"image_size": 16, "patch_size": 4}))


@pytest.mark.refuses
def test_a_model_whose_parts_attend_in_different_ways_is_not_saved(bert, tmp_path):
    model = whisper()
    set_attention(model.get_encoder(), "nystrom", {"num_landmarks": 4})
    with pytest.raises(ValueError, match="attends by sdpa in WhisperModel and nystrom in encoder, and a saved model"):
        save_with_attention(model, tmp_path / "whisper")
    model = siglip()
    set_attention(model.vision_model, "nystrom", {"num_landmarks": 4})
    with pytest.raises(ValueError, match="sdpa in SiglipModel and nystrom in vision_model"):
        save_with_attention(model, tmp_path / "siglip")
    set_attention(bert, "nystrom", {"num_landmarks": 4})
    set_attention(bert.encoder.layer[1], "sdpa")
    with pytest.raises(ValueError, match=r"nystrom in BertModel and sdpa in encoder\.layer\.1\..*exact_layers"):
        save_with_attention(bert, tmp_path / "bert")
    assert list(tmp_path.iterdir()) == []


def test_parts_with_options_of_their_own_are_saved_where_the_configuration_has_them(tmp_path):
    model = siglip()
    set_attention(model, "nystrom", {"num_landmarks": 4})
    model.config.vision_config.attention_options = {"num_landmarks": 3}
    model.vision_model.config.attention_options = {"num_landmarks": 3}
    save_with_attention(model, tmp_path / "kept")
    loaded = AutoModel.from_pretrained(tmp_path / "kept")
    options = [part.config.attention_options for part in (loaded.text_model, loaded.vision_model)]
    assert options == [{"num_landmarks": 4}, {"num_landmarks": 3}]
    assert loaded.vision_model.config._attn_implementation == "nystrom"
    # A configuration of its own, which that of the model does not hold.
    set_attention(model.vision_model, "nystrom", {"num_landmarks": 2})
    with pytest.raises(ValueError, match=r"vision_model attends with attention_options=\{'num_landmarks': 2\}, which"):
        save_with_attention(model, tmp_path / "lost")
    assert not (tmp_path / "lost").exists()


class Sentences(torch.nn.Sequential):
    """A SentenceTransformer saves its encoder, and a list of modules that says where."""

    def save_pretrained(self, folder):
        self[0].save_pretrained(f"{folder}/{PLACE}")
        with open(f"{folder}/modules.json", "w") as file:
            json.dump([{"path": PLACE}, {"path": "1_Pooling"}], file)


PLACE = "0_Transformer"


def test_a_model_of_sentence_transformers_comes_back_with_its_method(bert, tmp_path):
    set_attention(bert, "near_far", {"num_heavy": 3})
    save_with_attention(Sentences(bert, torch.nn.Identity()), tmp_path / "kept")
    loaded = AutoModel.from_pretrained(tmp_path / "kept" / PLACE)
    assert (loaded.config._attn_implementation, loaded.config.attention_options) == ("near_far", {"num_heavy": 3})


@pytest.mark.long
def test_a_loaded_sentence_transformer_gives_the_same_embeddings(bert, tmp_path):
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    from sentence_transformers import SentenceTransformer
    from transformers import BertTokenizer

    bert.save_pretrained(tmp_path / "a")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(tmp_path / "a")
    model = SentenceTransformer(modules=[modules.Transformer(str(tmp_path / "a")), modules.Pooling(32)], device="cpu")
    exact = model.encode(["a b c d e f g h a b c"])
    set_attention(model[0].auto_model, "nystrom", {"num_landmarks": 2})
    wanted = model.encode(["a b c d e f g h a b c"])
    save_with_attention(model, tmp_path / "kept")
    assert_close(SentenceTransformer(str(tmp_path / "kept"), device="cpu").encode(["a b c d e f g h a b c"]), wanted)
    assert abs(wanted - exact).max() > 1e-3


@pytest.mark.refuses
def test_a_model_that_holds_none_of_transformers_raises(tmp_path):
    with pytest.raises(ValueError, match="model is a Linear; expected a PreTrainedModel of transformers"):
        save_with_attention(torch.nn.Linear(2, 2), tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.refuses
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_around_a_model_raises_and_its_merged_weights_are_saved(bert, tmp_path):
    peft = pytest.importorskip("peft")
    set_attention(bert, "nystrom", {"num_landmarks": 4})
    model = peft.get_peft_model(bert, peft.LoraConfig(r=2, target_modules=["query"]))
    with pytest.raises(ValueError, match=r"saves its adapter alone.*merge_and_unload"):
        save_with_attention(model, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    save_with_attention(model.merge_and_unload(), tmp_path / "merged")
    assert AutoModel.from_pretrained(tmp_path / "merged").config._attn_implementation == "nystrom"
