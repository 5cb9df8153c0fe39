r"""Skyformer's remark on section 4.2: gradients through the modified Nyström method on softmax attention.

The queries, keys and values are those of the heads of an encoder. Measured is the norm of the gradient of
$\langle G, \mathrm{out}\rangle$ with respect to queries and keys, with one normal draw G for all methods. Rows hold the
ratio of that norm to the norm for softmax attention, as the median and the quartiles over heads and texts, and the
share of heads in which it is more than ten times as large. All is computed in float64, for

- "skyformer-printed": eq. 4-6 as printed (`nystrom_lab.studies.approximation.spectral_norm`), with m landmarks drawn
  independently from the 2n queries and keys;
- "skyformer_softmax": this library's variant of it, with evenly spread landmarks, a ridge, six steps of an iteration,
  and the guard (`nystrom.attention.methods.skyformer_softmax`).

Claim: the modified Nyström method on softmax attention "suffers a more severe gradient explosion issue than usual
transformers". Rule: at every m, over all layers of the pretrained encoder, the gradient of eq. 4-6 is more than ten
times as large as that of softmax attention in at least three heads of a hundred, by what is known of that share
(`nystrom_lab.studies.reproduce.known`). The numbers also show this library's variant, but no claim rests on it.

Source: Chen et al. (2021), arXiv:2111.00035, section 4.5 (remark), which prints no numbers.
Departs from the paper: heads of an encoder that was trained with softmax attention, instead of a training on the Long
Range Arena.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.methods.skyformer_softmax import skyformer_softmax_attention
from nystrom.attention.methods.softmax import softmax_attention
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.canvas import REFERENCE
from nystrom_lab.report.plots.lines import draw_lines
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.approximation.spectral_norm import printed_form
from nystrom_lab.studies.reproduce.encoders import Encoder, Recording, find_encoder
from nystrom_lab.studies.reproduce.known import most, share_of
from nystrom_lab.studies.reproduce.spread import spread_row
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PRINTED, OURS = "skyformer-printed", "skyformer_softmax"
RATIO, TENFOLD = "gradient norm over softmax's", "over ten times softmax's"
ALL = "all"
_LANDMARKS, _TOKENS = (16, 32, 64), 512
_TIMES, _HEADS = 10, 0.03


def _plan(setting: Setting) -> Plan:
    encoder, texts = find_encoder(setting), 16 if setting.size == "paper" else 4
    length = min(_TOKENS, encoder.positions)
    encoder.check_length(length, texts)
    said = {
        "model": encoder.name,
        "texts": encoder.prose.name,
        "tokens": str(length),
        "landmarks": " ".join(map(str, _LANDMARKS)),
        "sequences": str(texts),
    }
    differs = "heads of an encoder that was trained with softmax attention, without training"
    parts = [Part("gradients", partial(_measure, encoder, length, texts))]
    return Plan(parts, said, differs if setting.size == "paper" else f"{differs}; {texts} texts instead of 16")


def _measure(encoder: Encoder, length: int, texts: int, folder: Path) -> Iterable[Row]:
    del folder
    ratios: dict[tuple[str, int], dict[str, Tensor]] = {}
    generator = torch.Generator().manual_seed(0)
    for layer, given in encoder.record(length, texts, tuple(range(encoder.layers))).items():
        wide = Recording(*(x.double() for x in given))
        out = torch.randn(wide.v.shape, generator=generator, dtype=torch.float64)
        exact = gradient_norms(softmax_attention, wide, out)
        for m in _LANDMARKS:
            methods = {
                PRINTED: partial(_printed, num_landmarks=m, generator=generator),
                OURS: partial(skyformer_softmax_attention, num_landmarks=m),
            }
            for name, attend in methods.items():
                ratios.setdefault((name, m), {})[str(layer)] = gradient_norms(attend, wide, out) / exact
    for (name, m), of_layers in ratios.items():
        for layer, values in {ALL: torch.stack(list(of_layers.values())), **of_layers}.items():
            facts = {"layer": layer, "b": texts, "layers": encoder.layers}
            yield spread_row(RATIO, name, values, n=length, m=m, facts=facts, dtype="float64", seed=0, median=True)
            yield spread_row(TENFOLD, name, values > _TIMES, n=length, m=m, facts=facts, dtype="float64", seed=0)


def _printed(q: Tensor, k: Tensor, v: Tensor, *, num_landmarks: int, generator: torch.Generator) -> Tensor:
    """Eq. 4-6 on each head, each with its own landmarks."""
    heads = zip(*(x.flatten(0, 1) for x in (q, k, v)), strict=True)
    total = q.shape[2] + k.shape[2]
    inverse = partial(torch.linalg.pinv, hermitian=True)
    out = [
        printed_form(q, k, v, torch.randint(total, (num_landmarks,), generator=generator), inverse=inverse)
        for q, k, v in heads
    ]
    return torch.stack(out).unflatten(0, v.shape[:2])


def gradient_norms(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], given: Recording, out: Float[Tensor, "b h n e"]
) -> Float[Tensor, "b h"]:
    """The norm of each head's gradient with respect to queries and keys.

    Args:
        attend: The attention.
        given: Its queries, keys and values.
        out: The gradient with respect to its output.
    """
    q, k = (x.detach().clone().requires_grad_() for x in given[:2])
    of_q, of_k = torch.autograd.grad(attend(q, k, given.v), (q, k), out)
    return torch.cat([of_q, of_k], dim=2).flatten(2).norm(dim=2)


def _found(rows: Sequence[Row], quantity: str) -> dict[tuple[str, str], dict[int, Row]]:
    """Rows of a quantity by layer and method, then by landmarks."""
    found: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        if row.quantity == quantity and row.m is not None:
            found.setdefault((row.fact("layer"), row.method), {})[row.m] = row
    return found


def _tables(rows: Sequence[Row]) -> Sequence[Table]:
    medians, shares = _found(rows, RATIO), _found(rows, TENFOLD)
    counts = sorted({row.m for row in rows if row.m is not None})
    lines = [
        [layer, method, *(f"{of[m].value:.2f} ({100 * shares[layer, method][m].value:.0f})" for m in counts)]
        for (layer, method), of in sorted(medians.items(), key=lambda item: item[0])
    ]
    title = "gradient norm over softmax's: median over heads and texts (heads over ten times, %)"
    return [Table(title, ["layer", "method", *(f"m={m}" for m in counts)], lines, left=2)]


def _verdicts(rows: Sequence[Row]) -> Sequence[Verdict]:
    medians, shares = _found(rows, RATIO), _found(rows, TENFOLD)
    said = [
        f"{name} "
        + ", ".join(f"{100 * row.value:.1f} % and {medians[ALL, name][m].value:.2f} (m={m})" for m, row in of.items())
        for name in (PRINTED, OURS)
        if (of := shares.get((ALL, name)))
    ]
    known = (share_of(row.value, row.repeats) for row in shares.get((ALL, PRINTED), {}).values())
    numbers = f"heads over ten times softmax's, and median: {'; '.join(said)}." if said else "not measured."
    claim = "The modified Nyström method on self-attention, as printed, has the more severe gradient explosion."
    return [Verdict(claim, most(each.within(least=_HEADS) for each in known), numbers)]


def _figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    layers = dict.fromkeys(row.fact("layer") for row in rows if row.fact("layer") != ALL)
    ends = dict.fromkeys((next(iter(layers)), next(reversed(layers))))
    panels = {
        f"layer {int(layer) + 1}": [row for row in rows if row.quantity == RATIO and row.fact("layer") == layer]
        for layer in ends
    }
    band = "quartiles over heads and texts"
    figure = draw_lines(
        panels, over=lambda row: row.m, x_label="landmarks m", y_label=RATIO, band=band, line="medians", log_y=False
    )
    for axes in figure.axes[: len(panels)]:
        axes.axhline(1, color=REFERENCE, linewidth=0.6, linestyle=":")
    return {"": figure}


STUDIES = {
    "skyformer-gradients": Study(
        shows="gradients through eq. 4-6 as printed, and through this library's variant, beside softmax's",
        source="Skyformer, arXiv:2111.00035, section 4.5 (remark)",
        needs="an encoder: nystrom[real] or --model",
        minutes=0.2,
        plan=_plan,
        tables=_tables,
        verdicts=_verdicts,
        figures=_figures,
    )
}
