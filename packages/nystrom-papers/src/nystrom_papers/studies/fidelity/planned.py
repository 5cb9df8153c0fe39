r"""Exact attention, Nyström, near_far and plans in a whole encoder: error, time, memory, and a retrieval.

The encoder reads prose at its own length n, at most 512, and with its table of positions stretched (`nystrom convert`)
at 4 n; at the size "paper" also at 16 n.

- Retrieval: consecutive passages of twice the length are divided into stretches of some 30 tokens, which go to two
  texts in turn. This gives two texts on the same subject without a shared stretch. Each text is embedded as the mean of
  its hidden states, and takes the other text with the largest cosine as its answer. The accuracy is the share of texts
  whose answer is their other half; "answers that change" is the share whose answer differs from that of exact
  attention.
- Error: the relative error of the hidden states over all texts, against exact attention.
- Plans: a plan is chosen for its budget (`nystrom.inspection.choose_plan`) on two windows that no text is taken from.
- Time and memory are those of the whole encoder on one text, all methods in turn. Rows have the median and the
  quartiles over the rounds.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from nystrom.attention.method_names import read_method
from nystrom.attention.plan import AttentionPlan, LayerChoice, read_plan
from nystrom.inspection.budget import choose_plan
from nystrom.integrations.bert_names import FAMILIES
from nystrom.integrations.model_loader import read_model_config
from nystrom.integrations.set_attention import set_attention
from nystrom_lab.data.language.encoder_texts import load_encoder, tokens_of
from nystrom_lab.data.language.tokenizer import load_tokenizer
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.results import wilson
from nystrom_lab.training.run_progress import no_file_bars
from nystrom_papers.studies.fidelity.beside_exact import MEMORY, RATIO, time_calls
from nystrom_papers.studies.reproduce.declared import Answer, Cells, Claim, Lines, Pivot, by, declare, each
from nystrom_papers.studies.reproduce.encoders import Encoder, find_encoder
from nystrom_papers.studies.reproduce.known import holds_for_share, is_competitive, quartiles_of
from nystrom_papers.studies.reproduce.rules import all_within
from nystrom_papers.studies.reproduce.study import Part, Plan, Setting, beside_none

EXACT = "softmax"
METHODS = (EXACT, "nystrom-64", "near_far")
CANDIDATES = ("nystrom-64", "nystrom-256", "near_far", "near_far-128", EXACT)
BUDGETS = (0.05, 0.1)
ERROR, FOUND, CHANGED = "relative error of the hidden states", "halves found", "answers that change"
_ROUNDS, _STRETCH, _CHOSEN_ON, _MOST = 7, 32, 2, 128


def _plan(setting: Setting) -> Plan:
    encoder = find_encoder(setting)
    kind = read_model_config(encoder.folder).model_type
    if kind not in FAMILIES:
        raise ValueError(
            f"--model {encoder.folder} is of type {kind!r}, whose positions cannot be lengthened; expected one of "
            f"{', '.join(FAMILIES)}."
        )
    size = min(512, encoder.positions)
    lengths = (size, 4 * size, 16 * size) if setting.size == "paper" else (size, 4 * size)
    budgets = BUDGETS if setting.size == "paper" else BUDGETS[-1:]
    # Tokens of all texts of one length; the small size needs no more than the default texts have.
    whole = size * (2048 if setting.size == "paper" else 64)
    pairs = {n: min(_MOST, whole // (2 * n)) for n in lengths}
    encoder.check_length(whole + _CHOSEN_ON * max(lengths))
    parts = [
        *(Part(f"n={n}", partial(_measure, encoder, n, count, budgets)) for n, count in pairs.items()),
        *(Part(f"times-n={n}", partial(_measure_times, encoder, n, count, budgets)) for n, count in pairs.items()),
    ]
    said = encoder.in_words(
        lengths=lengths, pairs=pairs.values(), methods=METHODS, candidates=CANDIDATES, budgets=budgets, rounds=_ROUNDS
    )
    left_out = "a quarter of the texts of the shortest length, a sixteenth at four times that, none longer, one budget"
    return Plan(parts, said, beside_none(setting, left_out))


def _measure(encoder: Encoder, n: int, pairs: int, budgets: Sequence[float], folder: Path) -> Iterable[Row]:
    """Choose the plans, and compare them and the methods on the texts."""
    model, texts, others = _prepare(encoder, n, pairs, folder)
    models = {name: _attending(model, _uniform(model, name)) for name in METHODS}
    plans: dict[str, AttentionPlan] = {}
    for budget in budgets:
        name = f"plan {budget:g}"
        batches = [{"input_ids": ids[None]} for ids in others]
        plans[name] = choose_plan(model, batches, budget=budget, methods=CANDIDATES)
        plans[name].write(_plan_file(folder, n, budget))
        models[name] = _attending(model, plans[name])
    for name, (error, right, changed) in _compare(models, texts).items():
        facts = {"texts": 2 * pairs, "positions": _positions(encoder, n), "plan": plans.get(name)}
        rows = ((ERROR, error, None), (FOUND, right, wilson(right, 2 * pairs)), (CHANGED, changed, None))
        for quantity, value, interval in rows:
            low, high = interval or (None, None)
            yield Row(
                quantity=quantity, method=name, value=value, low=low, high=high, n=n, repeats=2 * pairs, facts=facts
            )


def _measure_times(encoder: Encoder, n: int, pairs: int, budgets: Sequence[float], folder: Path) -> Iterable[Row]:
    """Time and memory of the encoder on the first text, with the plans that were chosen."""
    model, texts, _ = _prepare(encoder, n, pairs, folder)
    models = {name: _attending(model, _uniform(model, name)) for name in METHODS}
    for budget in budgets:
        models[f"plan {budget:g}"] = _attending(model, read_plan(_plan_file(folder, n, budget)))
    facts = {"b": 1, "threads": torch.get_num_threads(), "positions": _positions(encoder, n)}
    calls = {name: partial(_hidden, each, texts[:1]) for name, each in models.items()}
    yield from time_calls(calls, _ROUNDS, beside=EXACT, memory=MEMORY, n=n, facts=facts)


def _prepare(
    encoder: Encoder, n: int, pairs: int, folder: Path
) -> tuple[PreTrainedModel, Int[Tensor, "t n"], Int[Tensor, "w n"]]:
    """The encoder, the texts, and the windows that plans are chosen on."""
    with no_file_bars():
        model, tokenizer = load_encoder(encoder.lengthened(n, folder).folder), load_tokenizer(encoder.folder)
    tokens, around = tokens_of(encoder.prose, tokenizer), tokenizer("")["input_ids"]
    assert isinstance(around, list), "of one text"
    length = n - len(around)
    texts, others = halves(tokens, length, pairs), tokens[-_CHOSEN_ON * length :].view(_CHOSEN_ON, -1)
    return model, _with_ends(texts, around), _with_ends(others, around)


def _plan_file(folder: Path, n: int, budget: float) -> Path:
    return folder / f"plan-{n}-{budget:g}.json"


def _positions(encoder: Encoder, n: int) -> str:
    return f"{encoder.positions}{'' if n <= encoder.positions else ',interpolated'}"


def _compare(models: Mapping[str, PreTrainedModel], texts: Int[Tensor, "t n"]) -> dict[str, tuple[float, float, float]]:
    """For each model the relative error, the share of halves found, and the share of answers that change."""
    off = dict.fromkeys(models, 0.0)
    size, means = 0.0, {name: [] for name in models}
    for ids in texts:
        exact = _hidden(models[EXACT], ids[None])
        size += float(exact.double().square().sum())
        for name, model in models.items():
            hidden = exact if name == EXACT else _hidden(model, ids[None])
            off[name] += float((hidden.double() - exact.double()).square().sum())
            means[name].append(hidden.mean(dim=1))
    answers = {name: nearest_others(torch.cat(each)) for name, each in means.items()}
    wanted = torch.arange(len(texts)) ^ 1
    return {
        name: (
            math.sqrt(off[name] / size),
            float((answer == wanted).double().mean()),
            float((answer != answers[EXACT]).double().mean()),
        )
        for name, answer in answers.items()
    }


def halves(tokens: Int[Tensor, " tokens"], length: int, pairs: int) -> Int[Tensor, "2*pairs length"]:
    """Two texts from each passage, which take its stretches in turn; passage i gives the texts 2 i and 2 i + 1."""
    stretch = max(size for size in range(1, _STRETCH + 1) if length % size == 0)
    passages = tokens[: 2 * length * pairs].view(pairs, -1, 2, stretch)
    return passages.transpose(1, 2).reshape(2 * pairs, length)


def nearest_others(means: Float[Tensor, "t w"]) -> Int[Tensor, " t"]:
    """For each text the other text with the largest cosine."""
    unit = F.normalize(means, dim=-1)
    return (unit @ unit.mT).fill_diagonal_(-torch.inf).argmax(dim=1)


def _with_ends(texts: Int[Tensor, "t l"], around: Sequence[int]) -> Int[Tensor, "t n"]:
    """Texts between the special tokens that the tokenizer puts around one."""
    half, count = len(around) // 2, len(texts)
    before, after = (torch.tensor(part).long().expand(count, -1) for part in (around[:half], around[half:]))
    return torch.cat([before, texts, after], dim=1)


def _uniform(model: PreTrainedModel, name: str) -> AttentionPlan:
    method, options = read_method(name)
    return AttentionPlan((LayerChoice(method, options),) * model.config.num_hidden_layers)


def _attending(model: PreTrainedModel, plan: AttentionPlan) -> PreTrainedModel:
    copied = copy.deepcopy(model)
    set_attention(copied, plan)
    return copied.eval()


@torch.no_grad()
def _hidden(model: PreTrainedModel, ids: Int[Tensor, "1 n"]) -> Float[Tensor, "1 n w"]:
    return model(input_ids=ids)[0]


_PLANS = {f"plan {budget:g}": budget for budget in BUDGETS}


def _kept(rows: pd.DataFrame) -> Answer:
    """A tenth above the budget is within the noise."""
    errors = each(rows, ERROR, method=_PLANS)
    said = ", ".join(f"{row.method} at {row.n}: {row.value:.3f}" for row in errors)
    over = [(row.value, _PLANS[row.method]) for row in errors]
    kept = (True if error <= budget else False if error > 1.1 * budget else None for error, budget in over)
    return holds_for_share(kept), f"{said or 'not measured'}."


def _as_many(rows: pd.DataFrame) -> Answer:
    """A share p of N answers changes, so the standard error of the difference is at most sqrt(p / N)."""
    exact, changed = by(rows, FOUND, "n", method=EXACT), by(rows, CHANGED, "method", "n")
    names = ("near_far", *_PLANS)
    fewer = [
        (row, exact[row.n])
        for row in sorted(each(rows, FOUND, method=names), key=lambda row: (row.n, names.index(row.method)))
        if row.n in exact and (row.method, row.n) in changed
    ]
    said = ", ".join(f"{ours.method} at {ours.n}: {ours.value:.3f} for {exact.value:.3f}" for ours, exact in fewer)
    agrees = holds_for_share(
        is_competitive(ours.value - exact.value, math.sqrt(changed[ours.method, ours.n].value / ours.repeats))
        for ours, exact in fewer
    )
    return agrees, f"{said or 'not measured'}."


STUDIES = {
    "inspect-plans": declare(
        shows="an encoder with near_far and with plans: error, time, memory, and a retrieval",
        source="this library",
        needs="an encoder: nystrom[real] or --model",
        minutes=3,
        plan=_plan,
        tables=[
            Pivot(
                title="hidden states, retrieval and time of one text",
                index={"n": "{n}", "attention": "{method}"},
                columns=[
                    Cells("error", ERROR, "{value:.3f}"), Cells("found %", FOUND, "{percent:.1f}"),
                    Cells("changed %", CHANGED, "{percent:.1f}"), Cells("time / exact", RATIO, "{value:.2f}"),
                ],
            ),
            Pivot(
                title="the plans", index={"n": "{n}", "plan": "{method}"}, left=3,
                columns=[Cells("layers", ERROR, "{plan}", method=_PLANS)],
            ),
        ],
        claims=[
            Claim("A plan keeps its budget on other texts.", _kept),
            Claim(
                "A plan takes at most exact attention's time.",
                all_within(
                    RATIO, quartiles_of, "{method} at {n}: {value:.2f}", between=", ", method=_PLANS,
                    limit=lambda _: 1.03,
                ),
            ),
            Claim("near_far and plans find at most two in a hundred halves fewer than exact attention.", _as_many),
        ],
        figures={
            "": Lines(
                of={"quantity": ERROR}, over=RATIO, panel="n = {n}", x_label=RATIO,
                y_label="error of the hidden states", band="", levels=BUDGETS,
                options={"log_x": False, "log_y": False, "columns": 3},
            )
        },
    )
}  # fmt: skip
