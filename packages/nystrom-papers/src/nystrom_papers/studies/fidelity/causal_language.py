r"""A small causal language model with exact attention, near_far, a sliding window with sinks, and heavy hitters.

A Llama of four layers is trained here with exact attention over 2,048 tokens, on long documents, one per line. It then
reads 2,048 tokens of each held-out document with other attentions, each with a cache of r tokens per head:

- near_far (`is_causal`): a window of two blocks, heavy tokens, and clusters of all others;
- a window with sinks: a sliding window of r - 4 tokens, and the first four tokens, the sinks (StreamingLLM, Xiao et al.
  2024, arXiv:2309.17453);
- heavy hitters: the same window as near_far, and the tokens that received the most attention so far, as many as fill
  the cache; the others are dropped (H2O, Zhang et al. 2023, arXiv:2306.14048).

Rows hold:

- the loss in nats per token over ranges of positions: the mean and the quartiles over documents, each document's mean
  being one observation;
- how much larger it is than that of exact attention, with two standard errors of the paired difference on either side
  as `low` and `high`;
- as "trained", the same after a short training with exact attention and with near_far;
- recall: among n random keys one equals the last query, and a head has found it if the output is more similar to its
  value than to any other;
- times on random tokens, 8 heads of width 64, forward and with the backward pass, in turns: of causal near_far with
  `near_far_sizes(n, is_causal=True)`, of near_far that is not causal, and of fused causal attention.
"""

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

from nystrom.attention.methods.near_far import near_far_attention
from nystrom.attention.options import near_far_sizes
from nystrom.progress import Progress
from nystrom_lab.data.language.encoder_texts import read_prose
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.table import Table
from nystrom_lab.training.run_progress import no_file_bars
from nystrom_papers.studies.fidelity.beside_exact import PASSES, Attention, time_passes
from nystrom_papers.studies.reproduce.declared import Answer, Cells, Claim, Lines, Pivot, by, declare, each, only
from nystrom_papers.studies.reproduce.known import holds_for_share, quartiles_of
from nystrom_papers.studies.reproduce.spread import difference_row, spread_row
from nystrom_papers.studies.reproduce.study import Part, Plan, Setting, beside_none, in_words, part

EXACT, OURS, WINDOW, HEAVY = "softmax", "near_far", "window + sinks", "heavy hitters"
LOSS, MORE, BETWEEN, FOUND = "loss", "loss - exact", "loss - near_far", "needles found"
TRAINED = "trained"
SINKS = 4
OPTIONS: dict[str, Any] = {"block_size": 64, "num_heavy": 24, "num_clusters": 40, "exact_up_to": 0}
# Two blocks, heavy tokens and clusters.
CACHE = 2 * 64 + 24 + 40
RANGES = (0, 128, 256, 512, 1024, 2048)
NEEDLES = 4096
LENGTHS, ROUNDS = (2048, 4096, 8192), 5
NOT_CAUSAL = "near_far, not causal"
TIMES = {what: (time, f"{time} / exact") for what, time in PASSES.items()}
# Characters to read of all texts, enough for the training.
_ENOUGH = 50_000_000


class LanguageTraining(NamedTuple):
    """The model and its training: steps with exact attention, more in each short training after it."""

    layers: int
    width: int
    vocabulary: int
    length: int
    batch: int
    steps: int
    more: int
    # Documents, to be read.
    held_out: int


SMALL = LanguageTraining(layers=4, width=256, vocabulary=4096, length=2048, batch=2, steps=2000, more=40, held_out=24)
PAPER = SMALL._replace(steps=8000, more=400, held_out=100)


def _plan(setting: Setting) -> Plan:
    prose = read_prose(setting.texts, most=_ENOUGH)
    sizes = PAPER if setting.size == "paper" else SMALL
    documents = [line for line in prose.text.splitlines() if len(line) > 10 * RANGES[-1]]
    if len(documents) <= 2 * sizes.held_out:
        raise ValueError(
            f"{prose.name} has {len(documents)} lines of more than {10 * RANGES[-1]:,} characters; expected more than "
            f"{2 * sizes.held_out} documents, one per line: name a file of them with --texts."
        )
    parts = [
        Part("train", partial(_train, documents, sizes)),
        Part("read", partial(_read, documents, sizes)),
        Part("train-more", partial(_train_more, documents, sizes)),
        part("recall", _recall),
        *(part(f"times-n={n}", _times, n) for n in LENGTHS),
    ]
    said = in_words(texts=prose.name, **sizes._asdict(), cache=CACHE)
    less = (
        f"{sizes.steps:,} steps instead of {PAPER.steps:,}, {sizes.more} instead of {PAPER.more} in the short "
        f"training, and {sizes.held_out} held-out documents instead of {PAPER.held_out}"
    )
    return Plan(parts, said, beside_none(setting, less))


# The model.


def _tokenizer(documents: Sequence[str], sizes: LanguageTraining, folder: Path) -> ByteLevelBPETokenizer:
    """The byte-level BPE tokenizer of the training documents, made once."""
    files = [str(folder / f"tokens-{name}") for name in ("vocab.json", "merges.txt")]
    if not all(Path(file).is_file() for file in files):
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(documents[: -sizes.held_out], vocab_size=sizes.vocabulary, show_progress=False)
        tokenizer.save_model(str(folder), "tokens")
    return ByteLevelBPETokenizer(*files)


def _stream(documents: Sequence[str], sizes: LanguageTraining, folder: Path) -> Tensor:
    """The tokens of all training documents, one document after the other."""
    encoded = _tokenizer(documents, sizes, folder).encode_batch(list(documents[: -sizes.held_out]))
    return torch.tensor([token for document in encoded for token in document.ids])


def _held_out(documents: Sequence[str], sizes: LanguageTraining, folder: Path) -> Tensor:
    encoded = _tokenizer(documents, sizes, folder).encode_batch(list(documents[-sizes.held_out :]))
    return torch.tensor([document.ids[: RANGES[-1] + 1] for document in encoded if len(document.ids) > RANGES[-1]])


def _train(documents: Sequence[str], sizes: LanguageTraining, folder: Path) -> Iterable[Row]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.width * 8 // 3 // 16 * 16,
        num_hidden_layers=sizes.layers,
        num_attention_heads=max(1, sizes.width // 64),
        max_position_embeddings=RANGES[-1],
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    tokens = _stream(documents, sizes, folder)
    loss = _steps(model, tokens, sizes, sizes.steps, learning_rate=1.5e-3)
    with no_file_bars():
        model.save_pretrained(folder / "model")
    seen = sizes.steps * sizes.batch * sizes.length
    facts = {"steps": sizes.steps, "b": sizes.batch, "tokens": seen, "layers": sizes.layers, "width": sizes.width}
    yield Row(quantity="training loss", method=EXACT, value=loss, unit="nats", n=sizes.length, facts=facts, seed=0)


def _steps(
    model: LlamaForCausalLM, tokens: Tensor, sizes: LanguageTraining, steps: int, *, learning_rate: float
) -> float:
    """Train, and return the mean loss of the last tenth of the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    draw, losses = random.Random(0), []
    model.train()
    for _ in Progress("training", steps, unit="steps").over(range(steps)):
        starts = [draw.randrange(len(tokens) - sizes.length - 1) for _ in range(sizes.batch)]
        batch = torch.stack([tokens[start : start + sizes.length + 1] for start in starts])
        loss = _losses(model, batch).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    return sum(losses[-max(1, steps // 10) :]) / len(losses[-max(1, steps // 10) :])


def _losses(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """The loss of each token after the first, in nats."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none").view(len(batch), -1)


# The attentions.


def near_far(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal near_far with `OPTIONS`."""
    return near_far_attention(q, k, v, is_causal=True, **OPTIONS)


def window_with_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to the first tokens and to the latest ones, `CACHE` together."""
    place = torch.arange(q.shape[2], device=q.device)
    apart = place[:, None] - place
    may = (apart >= 0) & ((apart < CACHE - SINKS) | (place < SINKS))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=may)


def heavy_hitters(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to near_far's window and to the tokens that received the most attention so far, `CACHE` together.

    A token that has left both is dropped for good. Blocks leave the window as a whole, as those of near_far do.
    """
    size, heads, n = OPTIONS["block_size"], q.shape[:2], q.shape[2]
    q, k, v = (F.pad(x, (0, 0, 0, -n % size)).flatten(0, 1) for x in (q / q.shape[-1] ** 0.5, k, v))
    place, fallen, out = torch.arange(q.shape[1]).expand(len(q), -1), torch.zeros_like(q[..., 0]), []
    heavy = place[:, :0]
    for start in range(0, q.shape[1], size):
        if start >= 2 * size:
            pool = torch.cat([heavy, place[:, start - 2 * size : start - size]], dim=1)
            most = fallen.gather(1, pool).topk(min(CACHE - 2 * size, pool.shape[1]), dim=1).indices
            heavy = pool.gather(1, most)
        seen = torch.cat([heavy, place[:, max(0, start - size) : start + size]], dim=1)
        keys, values = (x.gather(1, seen[..., None].expand(-1, -1, x.shape[2])) for x in (k, v))
        later = seen[:, None] > place[:, start : start + size, None]
        weights = (q[:, start : start + size] @ keys.mT).masked_fill(later, -torch.inf).softmax(dim=-1)
        fallen = fallen.scatter_add(1, seen, weights.sum(dim=1))
        out.append(weights @ values)
    return torch.cat(out, dim=1)[:, :n].unflatten(0, heads)


ATTENTIONS: dict[str, Attention] = {OURS: near_far, WINDOW: window_with_sinks, HEAVY: heavy_hitters}


@contextmanager
def _attending(model: LlamaForCausalLM, name: str) -> Iterator[None]:
    """Let a model use one of `ATTENTIONS`, or exact attention."""
    if name == EXACT:
        yield
        return

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **named: Any) -> tuple[Tensor, None]:
        return ATTENTIONS[name](q, k, v).transpose(1, 2), None

    implementation = f"study-{name.replace(' ', '-')}"
    AttentionInterface.register(implementation, attend)
    AttentionMaskInterface.register(implementation, lambda **named: None)
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


# The parts.


@torch.no_grad()
def _of_documents(model: LlamaForCausalLM, name: str, documents: Tensor) -> Tensor:
    with _attending(model, name):
        return torch.cat([_losses(model, document[None]) for document in documents])


def _rows(losses: Mapping[str, Tensor], after: str, exact: Tensor) -> Iterable[Row]:
    for name, loss in losses.items():
        for first, last in pairwise(RANGES):
            of_document = loss[:, first:last].mean(dim=1)
            facts = {"first": first, "cache": None if name == EXACT else CACHE, "after": after}
            yield spread_row(LOSS, name, of_document, n=last, facts=facts, unit="nats")
            if name != EXACT:
                more = of_document - exact[:, first:last].mean(dim=1)
                yield difference_row(MORE, name, more, unit="nats", n=last, facts=facts)


def _read(documents: Sequence[str], sizes: LanguageTraining, folder: Path) -> Iterable[Row]:
    model, held_out = _load(folder), _held_out(documents, sizes, folder)
    losses = {name: _of_documents(model, name, held_out) for name in (EXACT, *ATTENTIONS)}
    yield from _rows(losses, "", losses[EXACT])
    # Whether near_far is nearer than each of the others, document by document.
    late = slice(RANGES[-2], RANGES[-1])
    for name in (WINDOW, HEAVY):
        apart = (losses[name] - losses[OURS])[:, late].mean(dim=1)
        yield difference_row(BETWEEN, name, apart, unit="nats", n=RANGES[-1], facts={"first": RANGES[-2]})


def _train_more(documents: Sequence[str], sizes: LanguageTraining, folder: Path) -> Iterable[Row]:
    tokens, held_out = _stream(documents, sizes, folder), _held_out(documents, sizes, folder)
    losses = {}
    for name in (EXACT, OURS):
        model = _load(folder)
        with _attending(model, name):
            _steps(model, tokens, sizes, sizes.more, learning_rate=1.5e-4)
        losses[name] = _of_documents(model, name, held_out)
    yield from _rows(losses, TRAINED, losses[EXACT])


def _load(folder: Path) -> LlamaForCausalLM:
    with no_file_bars():
        return LlamaForCausalLM.from_pretrained(folder / "model", attn_implementation="sdpa").eval()


def _recall() -> Iterable[Row]:
    q, k, v, needle = needles(NEEDLES)
    exact = {EXACT: lambda *x: F.scaled_dot_product_attention(*x, is_causal=True)}
    for name, attend in (exact | ATTENTIONS).items():
        out = attend(q, k, v)[:, :, -1]
        similar = F.cosine_similarity(out[:, :, None], v, dim=-1)
        share = (similar.argmax(dim=-1) == needle).double().mean().item()
        yield Row(quantity=FOUND, method=name, value=share, n=NEEDLES, repeats=q.shape[1], facts={"d": 64}, seed=0)


def needles(n: int, heads: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values of random tokens, and the place of the needle: the last query equals its key.

    The needle is a token of the first half, a different one in each head.
    """
    g = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(1, heads, n, 64, generator=g) for _ in range(3))
    needle = torch.randint(n // 8, n // 2, (1, heads), generator=g)
    key = 6 * torch.randn(1, heads, 1, 64, generator=g)
    k = k.scatter(2, needle[..., None, None].expand_as(key), key)
    q[:, :, -1:] = key
    return q, k, v, needle


def _times(n: int) -> Iterable[Row]:
    torch.manual_seed(0)
    given = [torch.randn(1, 8, n, 64, requires_grad=True) for _ in range(3)]
    calls: dict[str, Attention] = {
        EXACT: partial(F.scaled_dot_product_attention, is_causal=True),
        OURS: partial(near_far_attention, is_causal=True, **near_far_sizes(n, is_causal=True)),
        NOT_CAUSAL: partial(near_far_attention, **near_far_sizes(n, selects=False)),
    }

    facts = {"b": 1, "h": 8, "d": 64, "threads": torch.get_num_threads()}
    yield from time_passes(calls, given, ROUNDS, beside=EXACT, what="exact", n=n, facts=facts, seed=0)


# Claims on the rows.


def _by_position(after: str, title: str, rows: pd.DataFrame) -> list[Table]:
    loss, more = (by(rows, quantity, "method", "n", after=after) for quantity in (LOSS, MORE))

    def cell(at: tuple[str, int]) -> str:
        beside = f" ({more[at].value:+.3f})" if at in more else ""
        return f"{math.exp(loss[at].value):.2f}{beside}" if at in loss else ""

    lines = [[name, *(cell((name, n)) for n in RANGES[1:])] for name in dict.fromkeys(name for name, _ in loss)]
    heads = [f"{first:,} to {last:,}" for first, last in pairwise(RANGES)]
    return [Table(f"perplexity (nats more than exact attention) by position, {title}", ["", *heads], lines)]


def _times_table(rows: pd.DataFrame) -> list[Table]:
    cells = by(rows, None, "quantity", "method", "n")
    lengths = sorted({n for quantity, _, n in cells if quantity == "forward time"})
    lines = [
        [name, what]
        + [f"{cells[time, name, n].value:,.0f} ({cells[ratio, name, n].value:.2f})" for n in lengths]
        for name in (EXACT, OURS, NOT_CAUSAL)
        for what, (time, ratio) in TIMES.items()
        if lengths and all((time, name, n) in cells for n in lengths)
    ]  # fmt: skip
    return [Table("ms (beside fused causal attention)", ["", "pass", *(f"n = {n:,}" for n in lengths)], lines, 2)]


def _nearer(name: str, of_it: str, rows: pd.DataFrame) -> Answer:
    """The other's loss is above ours; unknown where the model makes no use of the past."""
    last = {"n": RANGES[-1], "after": ""}
    itself, ours = (only(rows, MORE, method=method, **last) for method in (name, OURS))
    apart = only(rows, BETWEEN, method=name, **last)
    numbers = (
        f"Beyond {RANGES[-2]:,} tokens {of_it} loses {itself.value:.4f} nats to exact attention and near_far "
        f"{ours.value:.4f}; apart by {apart.value:.4f}, {apart.low:.4f} to {apart.high:.4f}."
    )
    return quartiles_of(apart).above(0) if itself.low > 0 else None, numbers


def _after_training(rows: pd.DataFrame) -> Answer:
    row = only(rows, MORE, method=OURS, n=RANGES[-1], after=TRAINED)
    return quartiles_of(row).within(most=0.02), f"{row.value:.4f}, {row.low:.4f} to {row.high:.4f}."


def _no_longer(rows: pd.DataFrame) -> Answer:
    """Compare the medians below 4,096 tokens, where it is exact, and those beside near_far that is not causal."""
    ratio = TIMES["forward"][1]
    ours, last = by(rows, ratio, "n", method=OURS), [only(rows, ratio, method=x, n=8192) for x in (OURS, NOT_CAUSAL)]
    beside = last[0].value / last[1].value
    decided = [quartiles_of(row).within(most=1) if n >= 4096 else row.value <= 1.05 for n, row in ours.items()]
    said = "; ".join(f"n = {n}: {row.value:.2f} of fused causal attention's time" for n, row in ours.items())
    return holds_for_share(
        [*decided, beside <= 1.5]
    ), f"{said}; {beside:.2f} of near_far's that is not causal at 8,192."


def _finds(rows: pd.DataFrame) -> Answer:
    shares = {row.method: row.value for row in each(rows, FOUND)}
    said = "; ".join(f"{name}: {share:.2f}" for name, share in shares.items()) or "Not measured"
    told = shares.get(EXACT, 0.0) >= 0.9
    return shares[OURS] >= 0.9 and shares[WINDOW] <= 0.1 if told else None, f"{said}."


STUDIES = {
    "causal-language": declare(
        shows="a causal language model with near_far, a window with sinks and heavy hitters: perplexity by position",
        source="this library",
        needs="--texts with long documents, one a line",
        trains=True,
        plan=_plan,
        tables=[
            partial(_by_position, "", "as trained, with exact attention"),
            partial(_by_position, TRAINED, "after a short training with each"),
            _times_table,
            Pivot(
                title=f"one token among {NEEDLES:,}: share of heads that find it", index={"": "{method}"},
                columns=[Cells("found", FOUND, "{value:.2f}")],
            ),
        ],
        claims=[
            *(
                Claim(
                    f"near_far is nearer to exact attention than {of_it} of the same size.",
                    partial(_nearer, name, of_it),
                )
                for name, of_it in ((WINDOW, "a window with sinks"), (HEAVY, "heavy hitters"))
            ),
            Claim(
                "After a short training with near_far it loses at most .02 nats to exact attention.", _after_training
            ),
            Claim("Causal near_far takes no longer than fused causal attention.", _no_longer),
            Claim("A token among thousands is found by near_far, and not by a window.", _finds),
        ],
        figures={
            "": Lines(
                of={"quantity": MORE, "after": ""}, over="n", panel="nats more than exact attention",
                x_label="position, up to", y_label="nats a token", band="two standard errors over documents",
                options={"log_y": False},
            )
        },
    )
}  # fmt: skip
