from functools import partial

import numpy as np
import pytest
import torch

from nystrom.attention.methods.near_far import near_far_rows
from nystrom.attention.methods.nystrom import nystrom_rows
from nystrom_lab.measure.rows import Row, read_rows
from nystrom_papers.studies.approximation.attention_maps import STUDIES, similarity
from nystrom_papers.studies.approximation.real_heads.pictures import block_means, read_pictures
from nystrom_papers.studies.approximation.real_heads.recorded import find_heads
from nystrom_papers.studies.reproduce.run import check_study, run_study

STUDY = STUDIES["nystromformer-figure-3"]
SIMILAR = "share of heads with a cosine similarity of 0.9"


def test_similarities_are_those_of_numpy():
    a, b = (torch.rand(1, 2, 5, 5, generator=torch.Generator().manual_seed(i)).double() for i in range(2))
    a, b = a.softmax(-1), b.softmax(-1)
    found = similarity(a, b)
    x, y = a[0, 1].flatten().numpy(), b[0, 1].flatten().numpy()
    assert found["cosine similarity"][0, 1].item() == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y))
    assert found["correlation"][0, 1].item() == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert found["total variation of a row"][0, 1].item() == pytest.approx(np.abs(x - y).sum() / 2 / 5)
    same = similarity(a, a)
    assert same[SIMILAR].tolist() == [[1, 1]]
    assert same["relative error of the matrix"].tolist() == [[0, 0]]


@pytest.mark.long
def test_maps_are_those_of_the_attention(tiny_setting, tmp_path):
    job = check_study("nystromformer-figure-3", tiny_setting, tmp_path)
    summary = run_study(job, lambda line: None)
    rows = read_rows(job.folder / "rows.csv")
    # Three layers with two kinds of weights, and six heads.
    for method in ("nystrom", "near_far"):
        assert sum((row.quantity, row.method) == ("cosine similarity", method) for row in rows) == 6
        assert sum(line[0] == method for line in summary.tables[1].lines) == 6
    (heads,) = find_heads(tiny_setting).layers("pretrained", (1,))
    pictures = read_pictures(job.folder)["layer 2, head 4"]
    for method, rows_of_attention in (("nystrom", nystrom_rows), ("near_far", partial(near_far_rows, exact_up_to=0))):
        made = rows_of_attention(heads.q, heads.k, torch.arange(512))
        np.testing.assert_allclose(pictures[method], block_means(made[0, 3]), atol=1e-6)
    # The same rows and arrays draw the other figure.
    figures = STUDIES["nystromformer-figure-2"].figures(rows, job.folder)
    assert [axes.get_title().split("\n")[0] for axes in figures[""].axes[:5]] == [
        "softmax matrix S", "F", "Z ≈ A⁺", "B", "Nyström F Z B",
    ]  # fmt: skip


def rows_of_share(share, heads=144):
    known = {"study": "", "method": "nystrom", "unit": "", "device": "cpu"}
    known["facts"] = {"weights": "pretrained", "layer": 0}
    of = ((SIMILAR, share), ("cosine similarity", 0.8), ("total variation of a row", 0.2))
    return [Row(quantity=quantity, value=value, repeats=heads, **known) for quantity, value in of]


@pytest.mark.parametrize(
    ("share", "heads", "expected"),
    [(0.7, 144, True), (0.3, 144, False), (0.45, 144, None), (0.55, 144, None), (0.7, 10, None)],
)
def test_the_rule_decides_where_the_share_is_known_to_be_on_one_side(share, heads, expected):
    (verdict,) = STUDY.verdicts(rows_of_share(share, heads))
    assert verdict.agrees is expected
