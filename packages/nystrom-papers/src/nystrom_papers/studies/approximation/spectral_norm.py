r"""Fig. 1 of Skyformer: how far the output of each method is from softmax attention's, over features and length.

The queries, keys and values are those of the first layer of an encoder, $Q, K, V = X W$ of an embedded text X. The
error of a method is the spectral norm $\|\hat O - O\|_2$ of the difference of the n x d outputs of a head, and that
norm relative to $\|O\|_2$. Rows hold the mean over heads and texts; `low` and `high` are the quartiles.

The methods of the paper's figure, each with its size d: the random features of performer, the queries and samples of
informer, the landmarks of nystrom, and what the figure calls "Skyformer", in two forms:

- "skyformer-printed" is eq. 4-6 as printed, in float64: d landmarks drawn independently and uniformly from the 2n
  queries and keys (Definition 1), the Moore-Penrose inverse, no ridge, and then
  $\tilde D = \mathrm{diag}(\tilde A \mathbf 1)$, regardless of its sign;
- "skyformer_softmax" is the method of this library, in float32: landmarks spread evenly over the segments, a ridge of
  0.1, six iterations for the inverse, and a result that is kept within the range of the values.

Beside them are the other methods of this library that approximate softmax attention. For linformer, as initialised, d
is the number of mixtures. For the others it is the number of keys that a query sees:

- longformer: its window;
- bigbird: its eight blocks;
- reformer: the two chunks of each of its two rounds of hashes, with keys that are separate from the queries;
- near_far: its near tokens, heavy keys and clusters together.

linear has no such number.

At n = 512 there is a dense reference in float64, "nystrom-columns": the standard Nyström method on columns and rows of
the softmax matrix itself (Nyströmformer, eq. 3-6), both at the same d tokens, drawn without replacement.

The rules on gains judge heads rather than means, since a single head may decide a mean. The gain of a head is its
relative error with the fewest features over that with the most.

Source: Chen et al. (2021), arXiv:2111.00035, section 4.5 and Fig. 1, which prints no numbers.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nystrom.attention.functions import FUNCTIONS
from nystrom.attention.heads import build_attention
from nystrom.attention.method_names import near_far_keys, reformer_buckets, size_options
from nystrom.kernels import gaussian_kernel, half_norms
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.table import Table
from nystrom_papers.report.summary import OURS
from nystrom_papers.studies.matrices.dense_nystrom import nystrom_columns_and_rows, nystrom_off_diagonal
from nystrom_papers.studies.matrices.spectra import spectral_norm
from nystrom_papers.studies.reproduce.declared import Answer, Cells, Claim, Lines, Pivot, declare, each, select
from nystrom_papers.studies.reproduce.encoders import Encoder, Recording, Weights, find_encoder, instead_of_bert_base
from nystrom_papers.studies.reproduce.known import UNKNOWN, Known, holds_for_share, quartiles_of, share_in
from nystrom_papers.studies.reproduce.spread import spread_row
from nystrom_papers.studies.reproduce.study import Plan, Setting, part

# The two forms of the modified Nyström method.
_FORMS = _PRINTED, _OURS = "skyformer-printed", "skyformer_softmax"
_RIVALS = ("nystrom", "performer", "informer")
_OTHERS = ("linformer", "longformer", "bigbird", "reformer", "linear", "near_far")
# A dense reference, and the length at which it is computed.
_COLUMNS, _DENSE = "nystrom-columns", 512
# The error falls by at least this factor where it is significantly better.
_GAINED = 2.0
_WEIGHTS: tuple[Weights, ...] = ("initialised", "pretrained")
_ABSOLUTE, _RELATIVE = "spectral norm of the error", "relative spectral norm of the error"
_GAIN = "relative error with the fewest features over that with the most"
_BEST = "share of heads with the smallest error of the four methods"


def _plan(setting: Setting) -> Plan:
    if setting.size == "paper" and setting.model is None:
        raise ValueError("--size paper needs bert-base-cased: name its folder with --model.")
    lengths = (512, 1024, 2048, 4096) if setting.size == "paper" else (512, 1024, 2048)
    windows, features = (10 if setting.size == "paper" else 2), (16, 32, 64, 128, 256)
    encoder = find_encoder(setting)
    encoder.check_length(max(lengths), windows)
    parts = [
        part(f"{weights}-n={n}", _measure, encoder, weights, n, features, windows)
        for weights, n in product(_WEIGHTS, lengths)
    ]
    methods = (*_FORMS, *_RIVALS, *_OTHERS)
    said = encoder.in_words(methods=methods, lengths=lengths, features=features, sequences=windows)
    if setting.size == "small":
        model = f"{encoder.name} instead of bert-base-cased"
        lacks = model, f"{windows} texts", f"lengths to {max(lengths)} instead of 4096"
    else:
        lacks = instead_of_bert_base(encoder.folder), f"{encoder.prose.name} instead of Wikitext-2"
    return Plan(parts, said, ", ".join(filter(None, lacks)))


def _measure(encoder: Encoder, weights: Weights, n: int, features: Sequence[int], windows: int) -> Iterable[Row]:
    given = encoder.record(n, windows, (0,), weights=weights)[0]
    wide = Recording(*(x.double() for x in given))
    exact = FUNCTIONS["softmax"](*given)
    size = spectral_norm(exact.double())
    facts = {"weights": weights, "b": windows, "h": given.q.shape[1], "d": given.q.shape[3]}
    relative: dict[tuple[str, int | None], Tensor] = {}

    def row(quantity: str, method: str, values: Tensor, m: int | None = None, median: bool = False) -> Row:
        dtype = "float64" if method in _DENSELY else "float32"
        return spread_row(quantity, method, values, n=n, m=m, facts=facts, seed=0, dtype=dtype, median=median)

    for method in (*_FORMS, *_RIVALS, *_OTHERS, *((_COLUMNS,) if n == _DENSE else ())):
        dense = _DENSELY.get(method)
        for m in (None,) if method == "linear" else features:
            out = dense(wide, m or 0) if dense else _attend(method, given, m)
            error = spectral_norm((out - exact).double())
            relative[method, m] = error / size
            yield row(_ABSOLUTE, method, error, m=m)
            yield row(_RELATIVE, method, relative[method, m], m=m)
    for method in (*_FORMS, *_RIVALS):
        gains = relative[method, min(features)] / relative[method, max(features)]
        yield row(_GAIN, method, gains, median=True)
    for form, m in product(_FORMS, features):
        rivals = torch.stack([relative[method, m] for method in _RIVALS]).amin(dim=0)
        yield row(_BEST, form, (relative[form, m] < rivals).double(), m=m)


def _attend(method: str, given: Recording, m: int | None) -> Float[Tensor, "b h n e"]:
    """A method's output with d = m."""
    n = given.k.shape[2]
    if method == "bigbird":
        options: dict[str, object] = {"num_random_blocks": 3, "block_size": (m or 0) // 8}
    elif method == "reformer":
        chunk = (m or 0) // 4
        options = {"chunk_size": chunk, "num_buckets": reformer_buckets(n, chunk), "shared_qk": False}
    elif method == "near_far":
        options = near_far_keys(m or 0)
    else:
        # A window is odd.
        options = size_options(method, None if m is None else m + (method == "longformer"))
    if method == "linformer":
        options["max_length"] = n
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        heads = build_attention(method, num_heads=given.q.shape[1], head_dim=given.q.shape[3], **options).eval()
        return heads(*given)


def _printed(given: Recording, m: int) -> Float[Tensor, "b h n e"]:
    q, k, v = given
    drawn = _draws(q, lambda generator: torch.randint(q.shape[2] + k.shape[2], (m,), generator=generator))
    # A head at a time: the matrix of one is large enough.
    flat = (x.flatten(0, 1) for x in (q, k, v, drawn))
    return torch.stack([printed_form(*head) for head in zip(*flat, strict=True)]).unflatten(0, tuple(q.shape[:2]))


def printed_form(
    q: Float[Tensor, "n d"],
    k: Float[Tensor, "s d"],
    v: Float[Tensor, "s e"],
    drawn: Int[Tensor, " m"],
    *,
    inverse: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, "n e"]:
    r"""Softmax attention of one head by eq. 4-6 of Skyformer as printed.

    $\tilde D^{-1} \tilde A V$ with $\tilde A = \mathrm{SM}(Q, L)\, \mathrm{SM}(L, L)^+\, \mathrm{SM}(L, K)$ and
    $\tilde D = \mathrm{diag}(\tilde A \mathbf 1)$. By Lemma 1 the exponentials are Gaussians times a factor for each
    token. The factors of the landmarks cancel against the inverse, and those of the queries against $\tilde D$. The
    factors of the keys are taken relative to the largest, so that nothing overflows.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        drawn: Indices of the landmarks L: queries below n, keys from n on.
        inverse: Replaces the Moore-Penrose inverse from eigenvalues, which has no gradient where a landmark is drawn
            twice; `torch.linalg.pinv` has one.
    """
    scale = q.shape[-1] ** -0.5
    norms = half_norms(k, scale=scale)
    a = nystrom_off_diagonal(partial(gaussian_kernel, scale=scale), q, k, drawn, inverse=inverse)
    a = a * torch.exp(norms - norms.detach().amax()).mT
    return a @ v / a.sum(dim=-1, keepdim=True)


def _columns_and_rows(given: Recording, m: int) -> Float[Tensor, "b h n e"]:
    q, k, v = given
    s = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1)
    drawn = _draws(q, lambda generator: torch.randperm(q.shape[2], generator=generator)[:m])
    return nystrom_columns_and_rows(s, drawn) @ v


def _draws(q: Float[Tensor, "b h n d"], draw: Callable[[torch.Generator], Int[Tensor, " m"]]) -> Int[Tensor, "b h m"]:
    """Draws for each head and sequence."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([draw(generator) for _ in range(q.shape[0] * q.shape[1])])
    return drawn.unflatten(0, tuple(q.shape[:2]))


# Methods that are computed densely, in float64, by their names in rows.
_DENSELY = {_PRINTED: _printed, _COLUMNS: _columns_and_rows}


def _table(quantity: str, rows: pd.DataFrame) -> list[Table]:
    """A table for each panel; a method without a size has its error in each column."""
    features = sorted(m for m in rows["m"].unique() if m is not None)
    level = [select(rows, quantity, m=None).assign(m=m) for m in features]
    return Pivot(
        title="{quantity}, {weights}, n = {n}",
        index={"method": "{method}"},
        columns=[Cells("d={m}", quantity, m=features)],
        names={"m": features, "method": (*_FORMS, *_RIVALS, *_OTHERS, _COLUMNS)},
    ).tables(pd.concat([select(rows, quantity), *level]))


def _panels(rows: pd.DataFrame, quantity: str) -> list[tuple[str, int]]:
    return list(dict.fromkeys((row.weights, row.n) for row in each(rows, quantity)))


def _gains(rows: pd.DataFrame, method: str) -> tuple[list[Known], str]:
    """The gain in each panel, and the range of those of the median head, in words."""
    gains = {(row.weights, row.n): row for row in each(rows, _GAIN, method=method)}
    medians = [row.value for row in gains.values()]
    shown = f"{min(medians):.2g} to {max(medians):.2g}" if medians else "unknown size"
    return [quartiles_of(gains[at]) if at in gains else UNKNOWN for at in _panels(rows, _RELATIVE)], shown


def _form_gains(form: str, rows: pd.DataFrame) -> Answer:
    gains, shown = _gains(rows, form)
    return holds_for_share(gain.within(least=_GAINED) for gain in gains), (
        f"from the fewest to the most features the error of the median head falls by a factor of {shown}, depending on "
        "the panel."
    )


def _others_do_not(rows: pd.DataFrame) -> Answer:
    gains = {method: _gains(rows, method) for method in _RIVALS}
    shown = ", ".join(f"{words} ({method})" for method, (_, words) in gains.items())
    answers = [gain.within(most=_GAINED) for of, _ in gains.values() for gain in of]
    return holds_for_share(answers), f"the error of the median head falls by a factor of {shown}."


def _smallest(form: str, rows: pd.DataFrame) -> Answer:
    best = each(rows, _BEST, method=form)
    answers = [share_in(row).above(0.5) for row in best]
    missing = [None] * len(set(_panels(rows, _RELATIVE)) - set(_panels(rows, _BEST)))
    return holds_for_share([*answers, *missing], 0.9), (
        f"its error is the smallest in most heads in {sum(row.value > 0.5 for row in best)} of {len(best)} cells, "
        f"beyond doubt in {answers.count(True)}."
    )


_PLACE = "Skyformer, section 4.5 and Fig. 1"
_NAMED = ((_PRINTED, _PLACE, "eq. 4-6 as printed"), (_OURS, OURS, "this library's variant"))
_SHOWN = partial(
    Lines, over="m", panel="{weights}, n = {n}", x_label="features d", y_label="relative error",
    band="quartiles over heads and texts", options={"columns": 3},
)  # fmt: skip
STUDIES = {
    "skyformer-figure-1": declare(
        shows="spectral norm of the error of each method over features and length",
        source="Skyformer, arXiv:2111.00035, Fig. 1",
        needs="an encoder: nystrom[real] or --model",
        paper_needs="--model with bert-base-cased",
        minutes=1,
        plan=_plan,
        tables=[partial(_table, _RELATIVE), partial(_table, _ABSOLUTE)],
        claims=[
            *(
                Claim(
                    f"The modified Nyström method gains from more features ({name}).", partial(_form_gains, form),
                    source,
                )
                for form, source, name in _NAMED
            ),
            Claim("For the other methods the gain is not obvious.", _others_do_not, _PLACE),
            *(
                Claim(
                    "At the same number of features the modified Nyström method has the smallest error of the four "
                    f"({name}).",
                    partial(_smallest, form), source,
                )
                for form, source, name in _NAMED
            ),
        ],
        figures={
            "": _SHOWN(of={"quantity": _RELATIVE, "method": (*_FORMS, *_RIVALS)}),
            "absolute": _SHOWN(
                of={"quantity": _ABSOLUTE, "method": (*_FORMS, *_RIVALS)}, y_label="spectral norm of the error"
            ),
            "others": _SHOWN(of={"quantity": _RELATIVE, "method": (_OURS, *_OTHERS)}),
        },
    ),
}  # fmt: skip
