import numpy as np
import pytest

from nystrom.linalg.pinv import pinv_iterative
from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.approximation.convergence import landmark_matrix
from nystrom_papers.studies.approximation.error_bound import STUDIES, proposition
from nystrom_papers.studies.approximation.real_heads.recorded import find_heads

STUDY = STUDIES["supplement-proposition-1"]
ERROR, BOUND, PLAIN = "error of the output", "bound of Proposition 1", "bound by the norm of Z alone"
WITHIN, RATIO = "share of heads within the bound", "bound over error"
ALL_ERROR, ALL_WITHIN = "error with all tokens as landmarks", "share of heads within the bound of Lemma 2"


def infinity(x):
    return np.linalg.norm(x, np.inf)


def test_error_and_bound_are_the_formulas_of_the_supplement(tiny_setting):
    (heads,) = find_heads(tiny_setting).layers("pretrained", (2,))
    a = landmark_matrix(heads, 8)
    z = pinv_iterative(a)
    found = proposition(heads, heads.softmax() @ heads.v, 8, z)
    q, k, v, z, a = (x[1, 3].numpy() for x in (heads.q, heads.k, heads.v, z, a))

    def softmax(x):
        return np.exp(x) / np.exp(x).sum(-1, keepdims=True)

    q_means, k_means = (x.reshape(8, 64, 8).mean(1) for x in (q, k))
    scale = 8**-0.5
    approximate = softmax(scale * q @ k_means.T) @ z @ softmax(scale * q_means @ k.T) @ v
    error = infinity(softmax(scale * q @ k.T) @ v - approximate)
    inverse = np.linalg.pinv(a)
    bound = (1 + infinity(inverse) + infinity(inverse - z)) * infinity(v)
    assert found[ERROR][1, 3].item() == pytest.approx(error / infinity(v), rel=1e-8)
    assert found[BOUND][1, 3].item() == pytest.approx(bound / infinity(v), rel=1e-6)
    assert found[PLAIN][1, 3].item() == pytest.approx(1 + infinity(z), rel=1e-8)
    assert (found[ERROR] <= found[PLAIN]).all()
    assert (found[PLAIN] <= found[BOUND]).all()


def row_of(quantity, value, *, m=64, weights="pretrained", inverse="iterative", k=None, **spread):
    return Row(
        study="", quantity=quantity, method="nystrom", value=value, unit="", device="cpu", n=512, m=m,
        facts={"weights": weights, "inverse": inverse, "k": k}, **spread,
    )  # fmt: skip


def bounds_of(*, within=1.0, lemma=1.0, last=1e-4, low=1e-5, high=2e-4):
    rows = [row_of(WITHIN, 1.0, weights=w, inverse=i) for w in ("pretrained", "initialised") for i in INVERSES]
    rows += [row_of(ALL_WITHIN, 1.0, weights=weights, k=3) for weights in ("pretrained", "initialised")]
    rows += [row_of(WITHIN, within, m=16), row_of(ALL_WITHIN, lemma, k=4)]
    rows += [row_of(RATIO, 9.0), row_of(PLAIN, 3.0), row_of(BOUND, 9.0)]
    return [*rows, row_of(ALL_ERROR, 0.1, k=6), row_of(ALL_ERROR, last, k=24, low=low, high=high, repeats=144)]


INVERSES = ("iterative", "exact")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [True, True, True]),
        ({"within": 0.99}, [False, True, True]),
        ({"lemma": 0.99}, [True, False, True]),
        ({"last": 0.1, "low": 0.01, "high": 0.2}, [True, True, False]),
        ({"high": 0.01}, [True, True, None]),
        ({"last": 0.01, "high": 0.1}, [True, True, None]),
    ],
)
def test_each_rule_agrees_refuses_and_cannot_tell(changes, expected):
    assert [verdict.agrees for verdict in STUDY.verdicts(bounds_of(**changes))] == expected


def test_a_bound_is_told_of_all_kinds_and_refuted_by_one_head_of_any():
    def agrees(rows, **of):
        kept = [row for row in rows if row.facts.items() >= of.items()]
        return [verdict.agrees for verdict in STUDY.verdicts(kept)][:2]

    for of in ({"weights": "pretrained"}, {"weights": "initialised"}):
        assert agrees(bounds_of(), **of) == [None, None]
    assert agrees(bounds_of(), inverse="iterative") == [None, True]
    assert agrees(bounds_of(within=0.99, lemma=0.99), weights="pretrained") == [False, False]
