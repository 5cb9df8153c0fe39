r"""Measure how close methods are to exact attention in a trained model, per layer and overall, from sampled queries.

While the model runs on texts, each layer is measured on its actual queries, keys and values
(`nystrom.inspection.layer_sample`), for a few sampled queries per text: time and memory are linear in the number of
tokens. With `whole_model`, the model runs with exact attention, which is fused and linear in memory but not in time,
and once with each method, and hidden states and predictions are compared. Without it the model runs with the first
method, so each layer is measured on inputs that this method produced in the layers below.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nystrom.attention.plan import PLAN
from nystrom.checks import check_at_least, check_seed
from nystrom.evaluation import evaluating
from nystrom.inspection.candidates import EXACT, SOFTMAX, Candidate, read_candidates
from nystrom.inspection.layer_sample import LayerSample, sample_layer
from nystrom.inspection.sampling import Estimate, Sample, estimate_ratio
from nystrom.inspection.times import Times, calls_of, time_methods
from nystrom.inspection.whole_model import Batch, Results, WholeModel, compare_models, results_of
from nystrom.integrations.bert_names import longest_input
from nystrom.integrations.layer_calls import LayerCall, attend_by, intercepted
from nystrom.progress import Progress


@dataclass(frozen=True)
class LayerMethod:
    r"""A method in a layer.

    Attributes:
        error: Relative error of each head's output, $\|\hat O - O\|_F / \|O\|_F$ over all texts; a layer's is the mean
            over its heads.
        variation: Mean total variation of the rows of each head; None if the method gives no rows.
        residual: Largest singular value of $I - A Z$ in each head, the mean over texts; None without an inverse.
    """

    error: Estimate
    variation: Estimate | None
    residual: Float[Tensor, " h"] | None


@dataclass(frozen=True)
class InspectedLayer:
    """A layer.

    Attributes:
        layer: Number, from 0.
        name: Name in the model.
        entropy: Entropy of the exact attention of each head, in nats.
        distance: Mean distance of the keys that a query attends to, in tokens.
        near: Weight on keys at most 32 tokens away.
        rank: Effective rank of each head's attention matrix, the mean over texts.
        methods: Results of each method, by name.
    """

    layer: int
    name: str
    entropy: Estimate
    distance: Estimate
    near: Estimate
    rank: Float[Tensor, " h"]
    methods: Mapping[str, LayerMethod]


@dataclass(frozen=True)
class Inspection:
    """The results of `inspect_model`.

    Attributes:
        candidates: The methods, in the order asked for.
        layers: The layers that methods can serve, in their order.
        left: Names of layers that keep exact attention with every method, such as local ones.
        whole: Results of the whole model by method, without exact attention, and under "nystrom_plan" those of the plan
            that the model has; empty if the caller did not ask for them.
        mended: For each method the layers with a large error, and the whole model with these exact; without
            methods with a large error in all layers, or in none.
        times: Times of one layer's attention over one text, in turns, by method, exact attention among them.
        texts: Sequences.
        tokens: Length of the longest.
        num_queries: Maximum number of queries sampled per sequence.
        dtype: Dtype of the layers' queries.
    """

    candidates: tuple[Candidate, ...]
    layers: tuple[InspectedLayer, ...]
    left: tuple[str, ...]
    whole: Mapping[str, WholeModel]
    mended: Mapping[str, tuple[tuple[int, ...], WholeModel]]
    times: Times
    texts: int
    tokens: int
    num_queries: int
    dtype: torch.dtype

    @property
    def seconds(self) -> dict[str, float]:
        """Median time of one layer's attention over one text, by method, exact attention among them."""
        return self.times.seconds


def inspect_model(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    methods: Sequence[str],
    num_queries: int = 128,
    whole_model: bool = True,
    exact_above: float = 0.3,
    seed: int = 0,
) -> Inspection:
    """Compare methods with exact attention in a model.

    Args:
        model: An encoder of transformers, a model of `nystrom.models`, or any Module that holds attention of this
            library, see `nystrom.replace_attention`. It is run in evaluation mode and restored afterwards.
        batches: Inputs of the model, by name or as its only input; each may hold several sequences and padding.
        methods: Names such as "nystrom-64"; they are compared with exact attention.
        num_queries: Queries r to sample per sequence and layer.
        whole_model: Also compare hidden states and predictions, which requires a run with exact attention.
        exact_above: Layers whose mean error over heads is larger than this get exact attention in `mended`.
        seed: Seed of the sample.

    Raises:
        ValueError: No batch, a method that is unknown or does not support the model, a model that no method
            supports, such as a decoder, or one whose numbers are not finite.
    """
    check_at_least("num_queries", num_queries, 2)
    check_seed("seed", seed)
    longest = longest_input(getattr(model, "config", None))
    candidates = tuple(each for each in read_candidates(methods, longest) if each.method != EXACT)
    if not batches:
        raise ValueError(
            "batches is empty; expected inputs of the model, such as [tokenizer(text, return_tensors='pt')]."
        )
    generator = torch.Generator().manual_seed(seed)
    record = _Record(candidates, num_queries, whole_model or not candidates, generator)
    with evaluating(model):
        exact: list[Results] = []
        layers_each = getattr(getattr(model, "config", None), "num_hidden_layers", None)
        with Progress("layers", layers_each and layers_each * len(batches)) as progress:
            for done, batch in enumerate(batches, start=1):
                with intercepted(
                    model, record.attend_and(progress.update), left=lambda call: record.left.setdefault(call.name)
                ):
                    exact.append(results_of(model, batch))
                if record.exact and not torch.isfinite(exact[-1].hidden).all():
                    raise ValueError(
                        f"the hidden states of {type(model).__name__} with exact attention are not finite, in "
                        f"{exact[-1].hidden.dtype}, so nothing can be compared with them: load it in float32."
                    )
                # Some layers may be left alone.
                progress.expect(progress.done // done * len(batches))
        if not record.samples:
            raise ValueError(
                f"{type(model).__name__} has no layer that attends to all tokens through transformers' "
                "AttentionInterface, so no method supports it: use another encoder, such as BERT or ModernBERT."
            )
        if record.kept is None:
            raise ValueError("attention_mask has no real token in any batch; expected at least one.")
        layers = tuple(_summarised(*entry) for entry in record.samples.items())
        whole, mended = {}, {}
        config = getattr(model, "config", None)
        planned = whole_model and PLAN in (
            getattr(config, name, None) for name in ("attention", "_attn_implementation")
        )
        runs = (len(candidates) + planned) * len(batches)
        with Progress("whole model", runs, unit="runs") as progress:
            for each in candidates if whole_model else ():
                whole[each.name] = compare_models(model, batches, exact, {None: each}, progress.update)
                badly = tuple(layer.layer for layer in layers if not layer.methods[each.name].error.mean <= exact_above)
                if 0 < len(badly) < len(layers):
                    runs += len(batches)
                    progress.expect(runs)
                    choice = {None: each} | dict.fromkeys(badly, SOFTMAX)
                    mended[each.name] = badly, compare_models(model, batches, exact, choice, progress.update)
            if planned:
                whole[PLAN] = compare_models(model, batches, exact, None, progress.update)
        with Progress("times", calls_of(candidates), unit="calls") as progress:
            times = time_methods(record.kept, candidates, progress.update)
        return Inspection(
            candidates=candidates,
            layers=layers,
            left=tuple(record.left),
            whole=whole,
            mended=mended,
            times=times,
            texts=record.texts,
            tokens=record.tokens,
            num_queries=num_queries,
            dtype=record.kept.q.dtype,
        )


class _Record:
    """Results gathered while the model runs."""

    def __init__(self, candidates: Sequence[Candidate], num_queries: int, exact: bool, generator: torch.Generator):
        self.candidates, self.num_queries, self.exact, self.generator = candidates, num_queries, exact, generator
        self.samples: dict[tuple[int, str], list[LayerSample]] = {}
        self.left: dict[str, None] = {}
        self.kept: LayerCall | None = None
        self.texts = self.tokens = 0

    def attend_and(self, tick: Callable[[], object]) -> Callable[[LayerCall], Tensor]:
        """Measure a layer, count it, and let the model go on."""

        def attend(call: LayerCall) -> Tensor:
            out = self.attend(call)
            tick()
            return out

        return attend

    def attend(self, call: LayerCall) -> Tensor:
        """Measure a layer, and return its output so that the model continues."""
        samples = self.samples.setdefault((call.layer, call.name), [])
        if call.layer == next(iter(self.samples))[0]:
            self.texts, self.tokens = self.texts + call.q.shape[0], max(self.tokens, call.q.shape[2])
        for place in range(call.q.shape[0]):
            one = call.sequence(place)
            sample = sample_layer(one, self.candidates, self.num_queries, self.generator)
            if sample is not None:
                samples.append(sample)
                if self.kept is None or one.q.shape[2] > self.kept.q.shape[2]:
                    self.kept = one
        method, options = (EXACT, {}) if self.exact else (self.candidates[0].method, self.candidates[0].options)
        return attend_by(method, call, options)


def _summarised(place: tuple[int, str], samples: Sequence[LayerSample]) -> InspectedLayer:
    layer, name = place

    def mean(fact: str) -> Estimate:
        values = [(sample.size, getattr(sample.facts, fact)) for sample in samples]
        return estimate_ratio([Sample(size, value, torch.ones_like(value)) for size, value in values])

    methods = {}
    for method in samples[0].methods:
        of = [sample.methods[method] for sample in samples]
        variations = [each.variation for each in of if each.variation is not None]
        residuals = [each.residual for each in of if each.residual is not None]
        methods[method] = LayerMethod(
            error=estimate_ratio([each.error for each in of], root=True),
            variation=estimate_ratio(variations) if variations else None,
            residual=torch.stack(residuals).mean(dim=0) if residuals else None,
        )
    rank = torch.stack([sample.facts.rank for sample in samples]).mean(dim=0)
    return InspectedLayer(layer, name, mean("entropy"), mean("distance"), mean("near"), rank, methods)
