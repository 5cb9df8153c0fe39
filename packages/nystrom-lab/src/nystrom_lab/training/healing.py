r"""The exact model teaches a converted one.

The converted model S starts with the weights of the exact model T, and only its attention differs. First each attention
block $S_l$ learns the output of its own exact block on what that reads in the exact model,
$$\min \tfrac1L \textstyle\sum_l \|S_l(h_{l-1}) - T_l(h_{l-1})\|^2 / \|T_l(h_{l-1})\|^2,\quad h = \text{states of } T,$$
then the whole model the exact hidden states, since errors of one layer are inputs of the next, and what it is for:
$$\min \tfrac1L \textstyle\sum_l \|s_l - h_l\|^2 / \|h_l\|^2 + w D.$$
D is the cosine distance of the pooled embeddings of an encoder, and the divergence KL(T || S) of the logits of a
language model or a classifier. A masked language model always reads texts of which every seventh token is masked. Sums
run over real tokens. The error that is reported, and chooses the best checkpoint, is $\|s_L - h_L\| / \|h_L\|$, a mean
over the held-out texts.

The exact model attends by torch's scaled_dot_product_attention, which works in blocks: nothing of size n x n is stored.
In the first stage the gradients of a layer are taken before the next layer runs, so the activations are those of one
layer. Both models compute as in use, without dropout.

Source: attention transfer, as in Hedgehog (arXiv:2402.04347) and LoLCATs (arXiv:2410.10254). Departs from them: by the
outputs of attention, since no method here stores weights.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from nystrom.attention.plan import PLAN, AttentionPlan, LayerChoice
from nystrom.integrations.set_attention import check_attention, set_attention
from nystrom.json_files import read_json
from nystrom.models.encoder import EncoderPreTrainedModel
from nystrom.models.files.folder import SENTENCE_MODULES, sentence_modules
from nystrom_lab.training.finite import NotFinite

# Weight w of the distance of embeddings, which is about half the square of their relative error.
_WEIGHT = 4.0
_RANK = 16
# Projections of queries and keys, by their names in transformers' models; some of them also hold the values.
_QUERIES_KEYS = ("query", "key", "q_proj", "k_proj", "q_lin", "k_lin", "q", "k")
_QUERIES_KEYS += ("qkv", "Wqkv", "qkv_proj", "c_attn", "query_key_value", "in_proj", "att_proj")
_LANGUAGE = ("MaskedLM", "PreTraining", "CausalLM", "LMHeadModel")
_CLASSIFIERS = ("SequenceClassification", "TokenClassification")
# Every how many tokens one is masked, and how many tokens of a text have their logits compared.
_MASKED_EVERY, _COMPARED = 7, 64
# A smaller error is of rounding.
_EXACT = 1e-5


class Errors(NamedTuple):
    """How far the converted model is from the exact one, for each text of a batch.

    Attributes:
        error: Error of the last hidden states, relative to their norm.
        distance: Distance of the pooled embeddings, or of the logits.
    """

    error: Tensor
    distance: Tensor


class Healing(nn.Module):
    """The converted model, and the exact one that teaches it.

    Only what learns is in its state: a checkpoint holds no more.

    Args:
        student: The converted model.
        folder: Folder of the model, which may say how a sentence encoder pools.
        learn: The weights that learn, see `HealOptions`.
        mask: The mask token of the tokenizer; None if it has none.

    Raises:
        ValueError: No layer runs a method, or what should learn is not there or cannot.
    """

    # The Trainer would else multiply the loss by the parts of a batch.
    accepts_loss_kwargs = False

    def __init__(self, student: PreTrainedModel, folder: Path, learn: str, *, mask: int | None):
        super().__init__()
        self.dtype = student.dtype
        student = student.float().eval()
        names = list(check_attention(student, two_tokens(student)).layers)
        # In a tuple, so that nn.Module does not register the teacher: it is neither trained nor saved.
        self._teacher = (_exact(student).requires_grad_(False),)
        self._blocks = [(_block(name), _layer(name)) for name in dict.fromkeys(names)]
        kind = type(student).__name__
        self._head = next((getattr(student, name) for name in ("cls", "lm_head") if hasattr(student, name)), None)
        self._language = self._head is not None and kind.endswith(_LANGUAGE)
        self._classifies = kind.endswith(_CLASSIFIERS)
        self._mask = mask if self._language and not kind.endswith(("CausalLM", "LMHeadModel")) else None
        self._first = _pools_first(folder)
        self.distance = "divergence of the logits" if self._language or self._classifies else "distance of embeddings"
        for weight in student.parameters():
            weight.requires_grad_(False)
        if learn == "adapters":
            _add_adapters(student, [f"{layer}." for _, layer in self._blocks])
        else:
            _let_learn(student, learn, self._blocks)
        self.student = student
        self.learned = {name: weight for name, weight in student.named_parameters() if weight.requires_grad}

    @property
    def teacher(self) -> PreTrainedModel:
        """The exact model."""
        return self._teacher[0]

    def train(self, mode: bool = True) -> "Healing":
        """Stay in evaluation mode: the models compute as in use."""
        return super().train(False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Healing":
        self.teacher._apply(fn)
        return super()._apply(fn, recurse)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The trainable weights."""
        return {name: weight.detach() for name, weight in self.learned.items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> Any:
        """Take over what learned."""
        with torch.no_grad():
            for name, weight in self.learned.items():
                weight.copy_(state_dict[name])
        return torch.nn.modules.module._IncompatibleKeys([], [])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, whole: bool) -> dict[str, Tensor]:
        """The loss of a batch: of each layer alone, or of the whole model."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        return {"loss": self._whole(inputs) if whole else self._by_layers(inputs)}

    def _by_layers(self, inputs: dict[str, Tensor]) -> Tensor:
        """The loss of the layers, whose gradients are taken while the exact model runs."""
        inputs, _ = self._masked(inputs)
        keep, losses = inputs["attention_mask"].bool(), []
        gradients = {weight: torch.zeros_like(weight) for weight in self.learned.values()}

        def teach(block: nn.Module, exact: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            weights = [weight for weight in block.parameters() if weight.requires_grad]
            with torch.enable_grad():
                made = _tensor(block(*args, **kwargs))
                loss = _relative(made, _finite(_tensor(output), keep), keep) / len(self._blocks)
                of_weights = torch.autograd.grad(loss, weights, allow_unused=True)
            losses.append(loss.detach())
            for weight, gradient in zip(weights, of_weights, strict=True):
                if gradient is not None:
                    gradients[weight] += gradient

        pairs = [(self.student.get_submodule(name), self.teacher.get_submodule(name)) for name, _ in self._blocks]
        hooks = [
            exact.register_forward_hook(lambda *given, block=block: teach(block, *given), with_kwargs=True)
            for block, exact in pairs
        ]
        try:
            with torch.no_grad():
                body = self.teacher.base_model
                body(**inputs, **without_cache(body))
        finally:
            for hook in hooks:
                hook.remove()
        # The sum is 0 and has these gradients: the backward pass of the Trainer, and of DDP, is then one of a few sums.
        moved = sum(((weight - weight.detach()) * gradient).sum() for weight, gradient in gradients.items())
        return torch.stack(losses).sum() + moved

    def _whole(self, inputs: dict[str, Tensor]) -> Tensor:
        inputs, places = self._masked(inputs)
        keep = inputs["attention_mask"].bool()
        with torch.no_grad():
            exact, goal = self._read(self.teacher, inputs, places)
        made, hidden = self._read(self.student, inputs, places)
        _finite(exact[-1], keep)
        loss = sum(_relative(mine, yours, keep) for mine, yours in zip(made, exact, strict=True)) / len(exact)
        return loss + (1.0 if places is not None or self._classifies else _WEIGHT) * self._distance(hidden, goal).mean()

    @torch.no_grad()
    def errors(self, input_ids: Tensor, attention_mask: Tensor) -> Errors:
        """The errors of each text of a batch.

        Raises:
            NotFinite: The states of the exact model are not finite.
        """
        errors = []
        for i in range(len(input_ids)):
            length = int(attention_mask[i].sum())
            one = {"input_ids": input_ids[i : i + 1, :length], "attention_mask": attention_mask[i : i + 1, :length]}
            one, places = self._masked(one)
            keep = one["attention_mask"].bool()
            exact, goal = self._read(self.teacher, one, places)
            made, mine = self._read(self.student, one, places)
            error = _relative(made[-1], _finite(exact[-1], keep), keep).sqrt()
            errors.append(torch.stack([error, self._distance(mine, goal).mean()]))
        return Errors(*torch.stack(errors).unbind(1))

    def check_differs(self, inputs: dict[str, Tensor]) -> None:
        """Check that there is something to learn.

        Raises:
            ValueError: The converted model is exact on these texts.
            NotFinite: The states of the exact model are not finite.
        """
        if float(self.errors(**inputs).error.max()) < _EXACT:
            raise ValueError(
                f"the converted model is exact on texts of {inputs['input_ids'].shape[1]} tokens, so nothing is to be "
                "healed: name longer texts, take a larger --length, or options that approximate these, such as fewer "
                "landmarks, or near_far's --exact-up-to 0."
            )

    def _masked(self, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        """The inputs as in use, and the tokens of the flat batch whose logits are compared; None for no language."""
        if not self._language:
            return inputs, None
        ids, keep = inputs["input_ids"], inputs["attention_mask"].bool()
        chosen = keep
        if self._mask is not None:
            # Neither the first token nor the last, which is of the tokenizer.
            chosen = keep & (torch.arange(ids.shape[1], device=ids.device) % _MASKED_EVERY == _MASKED_EVERY // 2)
            chosen &= torch.roll(keep, -1, dims=1)
            inputs = inputs | {"input_ids": torch.where(chosen, self._mask, ids)}
        places = chosen.flatten().nonzero().flatten()
        return inputs, places[:: -(-len(places) // (_COMPARED * len(ids))) or 1]

    def _read(
        self, model: PreTrainedModel, inputs: dict[str, Tensor], places: Tensor | None
    ) -> tuple[Sequence[Tensor], Tensor]:
        """The hidden states of each layer, and the logits or the pooled embeddings."""
        body: nn.Module = model if self._classifies else model.base_model
        out = body(**inputs, **without_cache(body), output_hidden_states=True)
        states = out.hidden_states[1:]
        if self._classifies:
            return states, out.logits.float()
        if places is not None:
            head: Any = getattr(model, "cls", None) or model.lm_head
            logits = head(out.last_hidden_state.flatten(0, 1)[places])
            return states, (logits[0] if isinstance(logits, tuple) else logits).float()
        last, keep = out.last_hidden_state.float(), inputs["attention_mask"][..., None]
        return states, last[:, 0] if self._first else (last * keep).sum(1) / keep.sum(1)

    def _distance(self, made: Tensor, exact: Tensor) -> Tensor:
        """The distance of embeddings, or the divergence of logits, of each."""
        if self._language or self._classifies:
            return F.kl_div(made.log_softmax(-1), exact.log_softmax(-1), reduction="none", log_target=True).sum(-1)
        return 1 - F.cosine_similarity(made, exact, dim=-1)

    def healed(self) -> PreTrainedModel:
        """The converted model, as it has learned so far."""
        model = copy.deepcopy(self.student)
        _merge_adapters(model)
        nn.Module.to(model, self.dtype)
        return model


def _exact(student: PreTrainedModel) -> PreTrainedModel:
    """A copy with exact attention, which reads the same masks."""
    model = copy.deepcopy(student)
    if isinstance(model, EncoderPreTrainedModel):
        set_attention(model, "sdpa")
        return model
    method, layers = str(model.config._attn_implementation), model.config.num_hidden_layers
    if method == PLAN:
        set_attention(model, AttentionPlan((LayerChoice("softmax", {}),) * layers))
    else:
        set_attention(model, method, {"exact_layers": tuple(range(layers))})
    return model


def _layer(name: str) -> str:
    """The layer of a module in it, by names: "encoder.layer.0" of "encoder.layer.0.attention.self"."""
    parts = name.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdigit()), default=len(parts) - 1)
    return ".".join(parts[: last + 1])


def _block(name: str) -> str:
    """The attention block of a layer, by names: "encoder.layer.0.attention" of "encoder.layer.0.attention.self"."""
    return ".".join(name.split(".")[: _layer(name).count(".") + 2])


def _let_learn(student: nn.Module, learn: str, blocks: Sequence[tuple[str, str]]) -> None:
    """Let weights learn.

    Raises:
        ValueError: None of that name is there, or one is not floating point.
    """
    for block, layer in blocks:
        inside = dict(student.get_submodule(layer if learn == "all" else block).named_parameters())
        if learn == "queries-keys":
            # The method's own weights, such as the skip convolution, learn with them.
            inside = {
                name: weight
                for name, weight in inside.items()
                if {*name.split(".")} & {*_QUERIES_KEYS, "conv", "method"}
            }
        if not inside:
            raise ValueError(
                f"learn is {learn!r}, but {block} of {type(student).__name__} has no such weights by the usual names: "
                "use learn 'attention'."
            )
        for name, weight in inside.items():
            if not weight.is_floating_point():
                raise ValueError(f"{layer}, {name} is {weight.dtype} and cannot learn: heal before quantisation.")
            weight.requires_grad_(True)


def _add_adapters(student: nn.Module, layers: Sequence[str]) -> None:
    """Add adapters of low rank to the linear layers of these layers.

    Raises:
        ValueError: PEFT is not installed.
    """
    if find_spec("peft") is None:
        raise ValueError("learn is 'adapters', which the package peft makes: pip install peft, or use 'attention'.")
    from peft import LoraConfig, inject_adapter_in_model

    names = [
        name
        for name, module in student.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(tuple(layers))
    ]
    inject_adapter_in_model(LoraConfig(r=_RANK, lora_alpha=2 * _RANK, target_modules=names), student)


def _merge_adapters(student: nn.Module) -> None:
    """Add the adapters to the weights, and remove them."""
    for name, module in list(student.named_modules()):
        if hasattr(module, "get_base_layer"):
            module.merge()  # pyright: ignore[reportCallIssue]
            student.set_submodule(name, module.get_base_layer())  # pyright: ignore[reportCallIssue]
    if hasattr(student, "peft_config"):
        del student.peft_config


def _pools_first(folder: Path) -> bool:
    """Whether a sentence encoder pools by its first token; else the mean over the real tokens."""
    if not (folder / SENTENCE_MODULES).is_file():
        return False
    settings = [folder / place / "config.json" for place in sentence_modules(folder / SENTENCE_MODULES)[1:]]
    modules = [read_json(path) for path in settings if path.is_file()]
    return any(each.get("pooling_mode_cls_token") or each.get("pooling_mode") == "cls" for each in modules)


def _tensor(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _finite(exact: Tensor, keep: Tensor) -> Tensor:
    """The states of the exact model, without gradient.

    Raises:
        NotFinite: One of a real token is not finite.
    """
    if not torch.isfinite(exact[keep]).all():
        raise NotFinite(
            f"the states of the exact model itself are not finite in a text of {int(keep.sum(1).max())} tokens: it "
            "cannot teach"
        )
    return exact.detach()


def _relative(made: Tensor, exact: Tensor, keep: Tensor) -> Tensor:
    """The square of the distance over real tokens, relative to that of the exact states from zero."""
    made, exact = made[keep].float(), exact[keep].float()
    return (made - exact).square().sum() / exact.square().sum()


def two_tokens(model: nn.Module) -> dict[str, Any]:
    """Inputs to try a model with."""
    return {"input_ids": torch.zeros(1, 2, dtype=torch.long), **without_cache(model)}


def without_cache(model: nn.Module) -> dict[str, bool]:
    """A decoder would keep the keys of the texts."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
