"""transformers' encoders over ranks: states, losses and gradients beside the unsplit model; run by `ranks.py`."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from nystrom.attention.plan import AttentionPlan
from nystrom.integrations import set_attention
from nystrom.integrations.over_ranks import AFTER_PADDING, PLACES
from nystrom.parallel import count_bytes, parallelize

PIECES = (7, 16)
SIZES = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40},
    **{"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "embedding_size": 16, "num_key_value_heads": 2},
    **{"max_position_embeddings": 30, "initializer_range": 0.3, "pad_token_id": 1, "head_dim": 8},
    # So small that a window ends within the other rank.
    **{"local_attention": 6},
    **{"bos_token_id": None, "eos_token_id": None, "cls_token_id": None, "sep_token_id": None},
}
HEADS = {
    AutoModelForMaskedLM: "tokens",
    AutoModelForTokenClassification: "tokens",
    AutoModelForSequenceClassification: "sequences",
}
# float64 rounding through two layers, each with an inverse, over sums in another order.
CLOSE = {"rtol": 1e-7, "atol": 1e-9}


def checks():
    kinds = (*PLACES, *AFTER_PADDING)
    for kind in kinds:
        for padding in ("right", "left", *(["none"] if kind in ("bert", "modernbert", "roberta") else [])):
            check = functools.partial(the_states_are_those_of_one_process, kind, padding, {}, {})
            yield f"{kind}, padding {padding}", check
    for kind in ("bert", "roberta", "distilbert", "electra", "albert", "modernbert", "nomic_bert", "eurobert"):
        for head in HEADS:
            changes = {"classifier_pooling": "bos"} if kind == "eurobert" else {}
            yield f"{kind} {head.__name__}", functools.partial(the_loss_is_that_of_one_process, kind, head, changes)
    for kind in ("modernbert", "eurobert"):
        check = functools.partial(
            the_loss_is_that_of_one_process, kind, AutoModelForSequenceClassification, {"classifier_pooling": "mean"}
        )
        yield f"{kind} with pooling by means", check
    for method, options in {
        "near_far": {"block_size": 4, "reach": 1, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0},
        "nystrom": {"num_landmarks": 4, "exact_layers": (0,)},
    }.items():
        for kind in ("bert", "modernbert"):
            check = functools.partial(the_states_are_those_of_one_process, kind, "right", {"method": method}, options)
            yield f"{kind} {method}", check
    yield "plan", a_plan_works
    yield "embeddings", embeddings_count_as_tokens
    yield "checkpointing", checkpointing_changes_nothing
    yield "bytes", local_layers_exchange_their_window
    yield "refused models", what_does_not_work_over_ranks_is_refused
    yield "refused inputs", inputs_that_do_not_fit_are_refused_on_all_ranks


def build(kind, head=AutoModel, *, method="nystrom", options=None, **changes):
    torch.manual_seed(0)
    layers = {"layer_types": ["full_attention", "sliding_attention"]} if kind == "modernbert" else {}
    config = AutoConfig.for_model(kind, **SIZES | layers | changes)
    model = head.from_config(config, attn_implementation=method).double().eval()
    set_attention(model, method, options or ({"num_landmarks": 4} if method == "nystrom" else {}))
    return model


def inputs(padding):
    """Ids and their mask: the second rank holds no real token of one sequence, or the first one."""
    ids = torch.randint(2, 40, (2, 23), generator=torch.Generator().manual_seed(1))
    place = torch.arange(23)
    mask = {
        "none": None,
        "right": place < torch.tensor([[6], [21]]),
        "left": place >= torch.tensor([[9], [3]]),
    }[padding]
    # RoBERTa tells padding by its id.
    return (ids, None) if mask is None else (torch.where(mask, ids, 1), mask.long())


def mine(x):
    return x.split(PIECES, 1)[dist.get_rank()]


def compare_gradients(model, theirs):
    for name, weight in model.named_parameters():
        if name in theirs:
            total = torch.zeros_like(weight) if weight.grad is None else weight.grad
            dist.all_reduce(total)
            said = functools.partial(str.__add__, f"{name}: ")
            torch.testing.assert_close(total / dist.get_world_size(), theirs[name], **CLOSE, msg=said)


def gradients(model):
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


def the_states_are_those_of_one_process(kind, padding, changes, options, model=None):
    model = build(kind, options=options, **changes) if model is None else model
    ids, mask = inputs(padding)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    grad = torch.randn(2, 23, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * real[..., None]
    out = model(input_ids=ids, attention_mask=mask)
    expected, pooled = out.last_hidden_state, out.get("pooler_output")
    loss = (expected * grad).sum()
    if pooled is not None and padding != "left":
        loss = loss + pooled.square().sum()
    loss.backward()
    theirs = gradients(model)
    parallelize(model, dist.group.WORLD)
    out = model(mine(ids), attention_mask=None if mask is None else mine(mask))
    torch.testing.assert_close(out.last_hidden_state[mine(real)], mine(expected)[mine(real)], **CLOSE)
    # Sums over ranks, so that their mean is the gradient: a rank's own tokens count as often as there are ranks.
    loss = (out.last_hidden_state * mine(grad)).sum() * dist.get_world_size()
    if pooled is not None and padding != "left":
        torch.testing.assert_close(out.pooler_output, pooled, **CLOSE)
        loss = loss + out.pooler_output.square().sum()
    loss.backward()
    compare_gradients(model, theirs)
    parallelize(model, None)
    torch.testing.assert_close(model(ids, attention_mask=mask).last_hidden_state, expected, rtol=0, atol=0)


def the_loss_is_that_of_one_process(kind, head, changes):
    model = build(kind, head, num_labels=3, **changes)
    for padding in ("none", "right") if kind in ("bert", "modernbert") else ("right",):
        ids, mask = inputs(padding)
        source = torch.Generator().manual_seed(3)
        tokens = torch.where(
            torch.rand(2, 23, generator=source) < 0.6, torch.randint(3, (2, 23), generator=source), -100
        )
        if mask is not None:
            tokens = torch.where(mask.bool(), tokens, -100)
        labels = tokens if HEADS[head] == "tokens" else torch.tensor([2, 0])
        expected = model(input_ids=ids, attention_mask=mask, labels=labels)
        loss = expected.loss
        if loss.dtype == torch.float32:
            # The same formula, which some models of transformers compute in float32 alone.
            loss = F.cross_entropy(expected.logits.flatten(0, 1), labels.flatten())
            torch.testing.assert_close(loss.float(), expected.loss)
        loss.backward()
        theirs = gradients(model)
        parallelize(model, dist.group.WORLD)
        given = {"attention_mask": None if mask is None else mine(mask)}
        given["labels"] = mine(labels) if labels.ndim == 2 else labels
        out = model(mine(ids), **given)
        torch.testing.assert_close(out.loss, loss, **CLOSE)
        if labels.ndim == 1:
            torch.testing.assert_close(out.logits, expected.logits, **CLOSE)
        else:
            real = mine(torch.ones_like(ids) if mask is None else mask).bool()
            torch.testing.assert_close(out.logits[real], mine(expected.logits)[real], **CLOSE)
        out.loss.backward()
        compare_gradients(model, theirs)
        model.zero_grad()
        as_tuple = model(mine(ids), **given, return_dict=False)
        torch.testing.assert_close(as_tuple[0], out.loss, rtol=0, atol=0)
        torch.testing.assert_close(as_tuple[1], out.logits, rtol=0, atol=0)
        assert model(mine(ids), attention_mask=given["attention_mask"]).loss is None
        parallelize(model, None)


def a_plan_works():
    model = build("bert")
    set_attention(model, AttentionPlan((("softmax", {}), ("nystrom", {"num_landmarks": 4}))))
    the_states_are_those_of_one_process("bert", "right", {}, {}, model)


def embeddings_count_as_tokens():
    for kind in ("roberta", "bert"):
        model = build(kind)
        words = torch.randn(2, 23, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        expected = model(inputs_embeds=words).last_hidden_state
        parallelize(model, dist.group.WORLD)
        torch.testing.assert_close(model(inputs_embeds=mine(words)).last_hidden_state, mine(expected), **CLOSE)


def checkpointing_changes_nothing():
    model = build("modernbert")
    ids, mask = inputs("right")
    parallelize(model, dist.group.WORLD)
    model(mine(ids), attention_mask=mine(mask)).last_hidden_state.square().sum().backward()
    theirs = gradients(model)
    # Layers are computed again in training alone; the model drops nothing.
    model.train().activation_checkpointing_enable()
    model(mine(ids), attention_mask=mine(mask)).last_hidden_state.square().sum().backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, theirs[name], **CLOSE)


def local_layers_exchange_their_window():
    model = build("modernbert", layer_types=["sliding_attention"] * 2, max_position_embeddings=300)
    parallelize(model, dist.group.WORLD)
    counted = []
    for length in (20, 120):
        ids = torch.randint(2, 40, (1, length), generator=torch.Generator().manual_seed(1))
        with count_bytes() as sent, torch.no_grad():
            model(ids)
        counted.append(sent.total)
    assert counted[0] == counted[1]


def what_does_not_work_over_ranks_is_refused():
    def refused(match, model):
        with pytest.raises(ValueError, match=match) as caught:
            parallelize(model, dist.group.WORLD)
        assert "\n" not in str(caught.value)

    refused("model type 'mobilebert'.*expected one of albert, bert,", build("mobilebert"))
    refused("BertForQuestionAnswering, whose head does not work", build("bert", AutoModelForQuestionAnswering))
    refused("attends by sdpa, and a layer of transformers' own", build("bert", method="sdpa"))
    refused(
        "attends by linear, which does not work over ranks: use one of nystrom, near",
        build("bert", method="linear"),
    )
    model = build("bert")
    set_attention(model.encoder.layer[0], "sdpa")
    refused("attends by nystrom and sdpa", model)
    late = build("eurobert", AutoModelForSequenceClassification, classifier_pooling="late")
    refused("classifier_pooling='late'", late)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    refused("rotation 'dynamic' depends on the length", build("eurobert", rope_parameters=rope))
    with pytest.raises(ValueError, match="group is a str"):
        parallelize(build("bert"), "tokens")
    model = build("bert")
    parallelize(model, dist.group.WORLD)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attends by sdpa"):
        model(torch.ones(1, 4, dtype=torch.int64))


def inputs_that_do_not_fit_are_refused_on_all_ranks():
    model, rank = build("bert", AutoModelForMaskedLM), dist.get_rank()
    parallelize(model, dist.group.WORLD)
    ids, labels = torch.ones(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.int64)

    def refused(match, *given, **named):
        with pytest.raises(ValueError, match=match):
            model(*given, **named)

    refused("attention_mask is None on rank 0, given on rank 1", ids, attention_mask=ids if rank else None)
    refused("labels is None on rank 0, given on rank 1", ids, labels=labels if rank else None)
    refused(r"attention_mask has shape \(1, 3\)", ids, attention_mask=ids[:, : 3 if rank else 4])
    low = torch.zeros(1, 4).masked_fill(torch.tensor([False, False, False, bool(rank)]), -torch.inf)
    refused("attention_mask has dtype torch.float32 and holds zeros alone, or numbers", ids, attention_mask=low)
    refused(r"labels has shape \(1, 5\), but this rank holds tokens", ids, labels=torch.ones(1, 5, dtype=torch.int64))
    refused("rank 1 of the group holds no tokens", ids[:, : 0 if rank else 4])
    refused("the ranks hold 40 tokens, padding included, and the model has 30 positions", ids.repeat(1, 5))
    refused("inputs_embeds is neither")
    refused("num_items_in_batch is given", ids, labels=labels, num_items_in_batch=4)
    model(ids, labels=labels)
