"""An input that is longer than a model's table of positions is refused by name, and nothing else is."""

import copy
import pickle

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModel, BertConfig, BertForMaskedLM, BertModel, ModernBertConfig, RobertaConfig

from nystrom.inspection import inspect_model
from nystrom.integrations import check_attention, set_attention
from nystrom.integrations.position_tables import PositionCheck

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
FEW = {"num_landmarks": 4}


def tokens(n, batch=1):
    return torch.randint(3, 60, (batch, n), generator=torch.Generator().manual_seed(1))


def bert(most=40, **how):
    torch.manual_seed(0)
    config = BertConfig(**SIZES, max_position_embeddings=most)
    return AutoModel.from_config(config, attn_implementation="nystrom", **how).eval()


def roberta():
    torch.manual_seed(0)
    config = RobertaConfig(**SIZES, max_position_embeddings=40, pad_token_id=1)
    return AutoModel.from_config(config, attn_implementation="nystrom").eval()


@pytest.mark.refuses
@pytest.mark.parametrize("way", ["made", "loaded", "set", "with a head", "copied"])
def test_however_the_method_was_set_the_message_names_the_way_out(way, tmp_path):
    model = bert()
    if way == "loaded":
        model.save_pretrained(tmp_path)
        model = BertModel.from_pretrained(tmp_path, attn_implementation="near_far")
    elif way == "set":
        model = BertModel(BertConfig(**SIZES, max_position_embeddings=40))
        set_attention(model, "nystrom")
    elif way == "with a head":
        model = BertForMaskedLM(BertConfig(**SIZES, max_position_embeddings=40))
        set_attention(model, "nystrom")
    elif way == "copied":
        model = copy.deepcopy(model)
    for call in (
        lambda: model(tokens(41)),
        lambda: model(input_ids=tokens(41)),
        lambda: model(inputs_embeds=torch.zeros(1, 41, 32)),
    ):
        with pytest.raises(
            ValueError,
            match=r"^BertModel is given 41 tokens, and its table has 40 positions: cut the texts to 40 "
            r"tokens, .*, or make more with `nystrom convert FOLDER --to OTHER --max-position-embeddings 41`\.$",
        ):
            call()


@pytest.mark.refuses
def test_inspection_and_the_check_refuse_them_whatever_the_model_is_set_to():
    model = BertModel(BertConfig(**SIZES, max_position_embeddings=40)).eval()
    with pytest.raises(ValueError, match="BertModel is given 41 tokens"):
        inspect_model(model, [{"input_ids": tokens(41)}], methods=["nystrom-4"])
    assert not model._forward_pre_hooks
    model.set_attn_implementation("nystrom")
    with pytest.raises(ValueError, match="BertModel is given 41 tokens"):
        check_attention(model, {"input_ids": tokens(41)})
    with pytest.raises(ValueError, match="BertModel is given 41 tokens"):
        model(tokens(41))


def test_positions_of_the_callers_are_left_alone():
    ids, places = tokens(60), torch.arange(60)[None] % 40
    with torch.no_grad():
        assert bert()(ids, position_ids=places).last_hidden_state.shape == (1, 60, 32)


def test_padding_that_has_a_position_of_its_own_does_not_count():
    model, ids = roberta(), tokens(38)
    padded = torch.nn.functional.pad(ids, (0, 30), value=1)
    mask = (padded != 1).long()
    with torch.no_grad():
        assert_close(
            model(padded, mask).last_hidden_state[:, :38], model(ids).last_hidden_state, rtol=0, atol=1e-5
        )  # float32 through two layers
        with pytest.raises(ValueError, match="RobertaModel is given 39 tokens, and its table has 38 positions"):
            model(torch.nn.functional.pad(tokens(39), (0, 30), value=1))


def test_a_model_without_a_table_has_no_check():
    config = ModernBertConfig(**SIZES, max_position_embeddings=16, pad_token_id=0)
    model = AutoModel.from_config(config, attn_implementation="nystrom").eval()
    assert not [hook for part in model.modules() for hook in part._forward_pre_hooks.values()]
    with torch.no_grad():
        assert model(tokens(30)).last_hidden_state.isfinite().all()


def test_one_model_has_one_check_and_models_of_others_none():
    model = bert()
    set_attention(model, "near_far")
    set_attention(model, "nystrom", FEW)
    assert [type(hook) for hook in model._forward_pre_hooks.values()] == [PositionCheck]
    assert not BertModel(BertConfig(**SIZES))._forward_pre_hooks


def test_a_pickled_model_runs_without_the_check():
    model = bert()
    again = pickle.loads(pickle.dumps(model))
    assert not [hook for hook in again._forward_pre_hooks.values() if isinstance(hook, PositionCheck)]
    with torch.no_grad():
        assert_close(again(tokens(40))[0], model(tokens(40))[0], rtol=0, atol=0)


@pytest.mark.long
# A strict export warns of what transformers keeps while a model runs.
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
@pytest.mark.parametrize(("make_model", "strict"), [(bert, False), (bert, True), (roberta, False)])
def test_it_compiles_to_one_graph_and_exports_at_any_length(make_model, strict):
    model, ids = make_model(), tokens(21, batch=2)
    model.config.attention_options = FEW
    mask = torch.ones_like(ids)
    with torch.no_grad():
        expected = model(ids, mask).last_hidden_state
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        # float32 through two layers: only without a compiler, loops of our own compute the inverse.
        assert_close(compiled(ids, mask).last_hidden_state, expected, rtol=0, atol=1e-5)
        length = torch.export.Dim("n", min=8, max=38)
        longer = tokens(33, batch=2)
        for given in ({"input_ids": ids, "attention_mask": mask}, {"input_ids": ids}):
            inputs = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
            inputs = {name: inputs[name] for name in given}
            program = torch.export.export(
                model, (), given, dynamic_shapes={name: {1: length} for name in given}, strict=strict
            )
            again = program.module()(**inputs).last_hidden_state
            assert_close(again, model(**inputs).last_hidden_state, rtol=0, atol=1e-5)
