r"""Skyformer's remark on section 4.2: gradients through the modified Nyström method on softmax attention.

The queries, keys and values are those of the heads of an encoder. Measured is the norm of the gradient of
$\langle G, \mathrm{out}\rangle$ with respect to queries and keys, with one normal draw G for all methods. Rows hold the
ratio of that norm to the norm for softmax attention, as the median and the quartiles over heads and texts, and the
share of heads in which it is more than ten times as large. All is computed in float64, for

- "skyformer-printed": eq. 4-6 as printed (`nystrom_papers.studies.approximation.spectral_norm`), with m landmarks drawn
  independently from the 2n queries and keys;
- "skyformer_softmax": this library's variant of it, with evenly spread landmarks, a ridge, six steps of an iteration,
  and the guard (`nystrom.attention.methods.skyformer_softmax`).

Source: Chen et al. (2021), arXiv:2111.00035, section 4.5 (remark), which prints no numbers.
Departs from the paper: heads of an encoder that was trained with softmax attention, instead of a training on the Long
Range Arena.
"""

from collections.abc import Callable, Iterable
from functools import partial

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.methods.skyformer_softmax import skyformer_softmax_attention
from nystrom.attention.methods.softmax import softmax_attention
from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.approximation.spectral_norm import printed_form
from nystrom_papers.studies.reproduce.declared import Answer, Cells, Claim, Lines, Pivot, by, declare
from nystrom_papers.studies.reproduce.encoders import Encoder, Recording, find_encoder
from nystrom_papers.studies.reproduce.known import holds_for_share, share_in
from nystrom_papers.studies.reproduce.spread import spread_row
from nystrom_papers.studies.reproduce.study import Plan, Setting, part

PRINTED, OURS = "skyformer-printed", "skyformer_softmax"
RATIO, TENFOLD = "gradient norm over softmax's", "over ten times softmax's"
ALL = "all"
# More than any encoder has.
_LAYERS = [*map(str, range(100))]
_LANDMARKS, _TOKENS = (16, 32, 64), 512
_TIMES, _HEADS = 10, 0.03


def _plan(setting: Setting) -> Plan:
    encoder, texts = find_encoder(setting), 16 if setting.size == "paper" else 4
    length = min(_TOKENS, encoder.positions)
    encoder.check_length(length, texts)
    said = encoder.in_words(tokens=length, landmarks=_LANDMARKS, sequences=texts)
    differs = "heads of an encoder that was trained with softmax attention, without training"
    parts = [part("gradients", _measure, encoder, length, texts)]
    return Plan(parts, said, differs if setting.size == "paper" else f"{differs}; {texts} texts instead of 16")


def _measure(encoder: Encoder, length: int, texts: int) -> Iterable[Row]:
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
    """The norm of each head's gradient with respect to queries and keys."""
    q, k = (x.detach().clone().requires_grad_() for x in given[:2])
    of_q, of_k = torch.autograd.grad(attend(q, k, given.v), (q, k), out)
    return torch.cat([of_q, of_k], dim=2).flatten(2).norm(dim=2)


def _explodes(rows: pd.DataFrame) -> Answer:
    """The claim on the paper's form; the text also has the numbers of this library's variant, which decide nothing."""
    medians = by(rows, RATIO, "method", "m", layer=ALL)
    shares = {name: by(rows, TENFOLD, "m", method=name, layer=ALL) for name in (PRINTED, OURS)}
    said = [
        f"{name} "
        + ", ".join(f"{100 * row.value:.1f} % and {medians[name, m].value:.2f} (m={m})" for m, row in of.items())
        for name, of in shares.items()
        if of
    ]
    numbers = f"heads over ten times softmax's, and median: {'; '.join(said)}." if said else "not measured."
    return holds_for_share(share_in(row).within(least=_HEADS) for row in shares[PRINTED].values()), numbers


STUDIES = {
    "skyformer-gradients": declare(
        shows="gradients through eq. 4-6 as printed, and through this library's variant, beside softmax's",
        source="Skyformer, arXiv:2111.00035, section 4.5 (remark)",
        needs="an encoder: nystrom[real] or --model",
        minutes=0.2,
        plan=_plan,
        tables=[
            Pivot(
                title="gradient norm over softmax's: median over heads and texts (heads over ten times, %)",
                index={"layer": "{layer}", "method": "{method}"},
                names={"layer": [*_LAYERS, ALL], "method": (PRINTED, OURS)},
                columns=[
                    Cells(
                        "m={m}", RATIO, "{value:.2f} ({share})", beside=[Cells("share", TENFOLD, "{percent:.0f}")],
                        on=("layer", "method", "m"),
                    )
                ],
            )
        ],
        claims=[
            Claim(
                "The modified Nyström method on self-attention, as printed, has the more severe gradient explosion.",
                _explodes, "Skyformer, section 4.5",
            )
        ],
        figures={
            "": Lines(
                of={"quantity": RATIO}, over="m", names={"layer": _LAYERS}, panel="layer {number}", levels=(1.0,),
                x_label="landmarks m", y_label=RATIO, band="quartiles over heads and texts",
                options={"line": "medians"},
            )
        },
    )
}  # fmt: skip
