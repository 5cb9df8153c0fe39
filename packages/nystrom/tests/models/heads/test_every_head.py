"""Facts of every model with a head: padding, saving, training, compilation and adapters."""

import pytest
import torch
import transformers
from torch import nn
from torch.testing import assert_close
from transformers import Trainer, TrainingArguments

import nystrom.models
from nystrom.models import EncoderConfig

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
HEADS = (
    *("ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification"),
    *("ForMultipleChoice", "ForQuestionAnswering"),
)
every_head = pytest.mark.parametrize("head", HEADS)
# float64 rounding through an inverse whose condition is a few thousand.
CLOSE = {"rtol": 1e-8, "atol": 1e-9}


def make(head, **changes):
    torch.manual_seed(0)
    options = {"max_position_embeddings": 40, "conv_kernel_size": 5, "num_labels": 3, "initializer_range": 0.3}
    options |= {"attention_options": {"num_landmarks": 5}, "hidden_dropout_prob": 0.0}
    config = EncoderConfig(**(SIZES | options | changes))
    return getattr(nystrom.models, f"Encoder{head}")(config).double().eval()


def draw(head, b=4, n=12, seed=1):
    """Tokens, and labels of which each sample has the same number."""
    source = torch.Generator().manual_seed(seed)
    shape = (b, 3, n) if head == "ForMultipleChoice" else (b, n)
    ids = torch.randint(0, 40, shape, generator=source)
    classes = torch.randint(0, 3, (b,), generator=source)
    places = torch.full((b, n), -100)
    places[:, 1::4] = torch.randint(0, 3, places[:, 1::4].shape, generator=source)
    labels = {
        "ForMaskedLM": {"labels": places},
        "ForPreTraining": {"labels": places, "sentence_order_label": classes % 2},
        "ForTokenClassification": {"labels": places},
        "ForQuestionAnswering": {"start_positions": classes, "end_positions": classes + 2},
    }
    return ids, labels.get(head, {"labels": classes})


def outputs(model, ids, **given):
    output = model(ids, **given)
    return {name: value for name, value in output.items() if name != "loss" and torch.is_tensor(value)}


@every_head
@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_padding_and_neighbours_change_nothing(head, pooling):
    model, (ids, _) = make(head, pooling=pooling), draw(head)
    padded, mask = torch.full((*ids.shape[:-1], 20), 7), torch.zeros(*ids.shape[:-1], 20, dtype=torch.long)
    padded[..., 3:15], mask[..., 3:15] = ids, 1
    together = outputs(model, padded, attention_mask=mask)
    for i in range(4):
        for name, alone in outputs(model, ids[i : i + 1]).items():
            among = together[name][i : i + 1]
            assert_close(among[:, 3:15] if among.shape[1] == 20 else among, alone, **CLOSE)


def test_an_answer_is_never_among_the_padding():
    head = "ForQuestionAnswering"
    model, (ids, labels) = make(head), draw(head)
    padded, mask = torch.cat([ids, ids], dim=1), torch.ones(4, 24, dtype=torch.long)
    mask[:, 12:] = 0
    output = model(padded, attention_mask=mask, **labels)
    assert_close(output.loss, model(ids, **labels).loss, **CLOSE)
    assert output.start_logits.argmax(-1).max() < 12


@every_head
def test_a_saved_model_comes_back_whole_or_in_pieces(head, tmp_path):
    model, (ids, _) = make(head).float(), draw(head)
    kind = {"ForPreTraining": "PreTraining"}.get(head, head.removeprefix("For"))
    auto = getattr(transformers, f"AutoModelFor{kind}")
    for size, files in (("1GB", 1), ("20KB", 2)):
        folder = tmp_path / size
        model.save_pretrained(folder, max_shard_size=size)
        assert len(list(folder.glob("*.safetensors"))) >= files
        loaded, report = auto.from_pretrained(folder, output_loading_info=True)
        assert type(loaded) is type(model)
        assert not any(report.values())
        # The same weights, but their place in memory moves the last bits of a product.
        assert_close(outputs(loaded, ids), outputs(model, ids), rtol=1e-5, atol=1e-5)


@every_head
def test_gradient_checkpointing_gives_the_same_gradients(head):
    model, (ids, labels) = make(head).train(), draw(head)
    gradients = []
    for on in (False, True):
        if on:
            # transformers 5.23 renames it, and warns of the old name.
            (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
        model.zero_grad()
        model(ids, **labels).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(layer.gradient_checkpointing for layer in model.nystromformer.encoder.layer)
    assert_close(gradients[0], gradients[1], **CLOSE)


@every_head
@pytest.mark.long
def test_compile_makes_one_graph(head):
    # Graphs compiled before count towards the limit of graphs per function.
    torch._dynamo.reset()
    model, (ids, labels) = make(head), draw(head)
    mask = torch.ones_like(ids)
    mask[1, ..., 8:] = 0
    # The backward is traced for one head alone, since it takes seconds; it is the same encoder.
    backend = "aot_eager" if head == "ForMaskedLM" else "eager"
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    expected, came = (m(ids, attention_mask=mask, **labels) for m in (model, compiled))
    assert_close(came.to_tuple(), expected.to_tuple(), **CLOSE)
    came.loss.backward()


@every_head
def test_attention_weights_are_refused_by_name(head):
    with pytest.raises(ValueError, match="output_attentions is True, but no method stores"):
        make(head)(draw(head)[0], output_attentions=True)


@every_head
def test_a_mask_of_heads_is_none_or_raises(head):
    model, (ids, _) = make(head), draw(head)
    assert_close(outputs(model, ids, head_mask=None), outputs(model, ids), rtol=0, atol=0)
    with pytest.raises(ValueError, match="head_mask is a tensor; expected None"):
        model(ids, head_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"keyword 'output_hidden_state' is unknown.*'output_hidden_states'"):
        model(ids, output_hidden_state=True)


@every_head
def test_labels_may_be_whole_numbers_of_any_width(head):
    model, (ids, labels) = make(head), draw(head)
    narrow = {name: value.int() for name, value in labels.items()}
    assert_close(model(ids, **narrow).loss, model(ids, **labels).loss, rtol=0, atol=0)


@every_head
def test_a_tuple_holds_what_the_object_holds(head):
    model, (ids, labels) = make(head), draw(head)
    whole = model(ids, **labels, output_hidden_states=True)
    assert len(whole.hidden_states) == 3
    assert_close(model(ids, **labels, output_hidden_states=True, return_dict=False), whole.to_tuple(), rtol=0, atol=0)


@every_head
def test_word_embeddings_can_be_resized(head):
    model = make(head)
    model.resize_token_embeddings(47)
    ids, labels = draw(head)
    output = model(ids.clone().fill_(46), **labels)
    assert output.loss.isfinite()
    if head in ("ForMaskedLM", "ForPreTraining"):
        words = output[1]
        assert words.shape[-1] == 47
        assert model.cls.predictions.decoder.weight is model.get_input_embeddings().weight
        assert model.cls.predictions.decoder.bias is model.cls.predictions.bias


class OneStep(Trainer):
    """Keeps the gradient of its only optimiser step."""

    def create_optimizer(self, *given, **named):
        super().create_optimizer(*given, **named)
        step = self.optimizer.step

        def keep(*values, **names):
            self.gradients = [parameter.grad.clone() for parameter in self.model.parameters()]
            return step(*values, **names)

        self.optimizer.step = keep
        return self.optimizer


def train(model, head, folder, *, batch, accumulation):
    ids, labels = draw(head, b=8)
    samples = [{"input_ids": ids[i], **{name: value[i] for name, value in labels.items()}} for i in range(8)]
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
        max_steps=1, max_grad_norm=0.0, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    trainer = OneStep(model=model, args=arguments, train_dataset=samples)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(samples)
    trainer.train()
    return trainer.gradients


@every_head
@pytest.mark.long
def test_accumulation_in_the_trainer_gives_the_gradient_of_one_big_batch(head, tmp_path):
    assert make(head).accepts_loss_kwargs is False
    whole = train(make(head), head, tmp_path, batch=8, accumulation=1)
    parts = train(make(head), head, tmp_path, batch=2, accumulation=4)
    # Each sample has as many labels, so the mean of the means is the mean.
    assert max(gradient.abs().max() for gradient in whole) > 1e-3
    assert_close(parts, whole, **CLOSE)


# PEFT 0.21 asks transformers 5.23 for a property by its old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@every_head
def test_lora_trains_its_own_weights_alone(head, tmp_path):
    peft = pytest.importorskip("peft")
    model, (ids, labels) = make(head).float(), draw(head)
    frozen = {name: weight.clone() for name, weight in model.state_dict().items()}
    before = outputs(model, ids)
    config = peft.LoraConfig(r=4, target_modules=["query", "value"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted(ids, **labels).loss.backward()
    trained = {name for name, weight in adapted.named_parameters() if weight.grad is not None}
    assert trained
    assert all("lora_" in name for name in trained)
    after = outputs(adapted, ids)
    assert not torch.allclose(next(iter(after.values())), next(iter(before.values())), atol=1e-3)
    adapted.save_pretrained(tmp_path / "adapter")
    fresh = make(head).float()
    fresh.load_state_dict(frozen)
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    assert_close(outputs(again, ids), after, rtol=1e-5, atol=1e-5)


@every_head
def test_start_values_are_those_of_the_configuration(head):
    model = make(head, initializer_range=0.05)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.weight.numel() > 500:
            assert module.weight.std().item() == pytest.approx(0.05, rel=0.15), name
            assert not module.bias.any(), name
