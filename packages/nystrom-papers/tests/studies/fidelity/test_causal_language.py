"""A small causal language model read with several attentions of one cache, and verdicts that can refuse."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from nystrom_lab.measure.rows import Row, read_rows
from nystrom_papers.studies.fidelity import causal_language as study
from nystrom_papers.studies.reproduce.run import check_study, run_study
from nystrom_papers.studies.reproduce.study import Setting

NAME = "causal-language"
TINY = study.LanguageTraining(layers=1, width=64, vocabulary=300, length=256, batch=1, steps=3, more=2, held_out=2)


@pytest.mark.long
def test_the_study_from_end_to_end(tmp_path, monkeypatch):
    small = {"SMALL": TINY, "RANGES": (0, 128, 256, 320), "NEEDLES": 512, "LENGTHS": (64, 1100), "ROUNDS": 1}
    for name, value in small.items():
        monkeypatch.setattr(study, name, value)
    words = [f"word{number}" for number in range(50)]
    draw = random.Random(0)
    lines = [" ".join(draw.choice(words) for _ in range(600)) for _ in range(6)]
    (tmp_path / "texts.txt").write_text("\n".join(lines))
    setting = Setting(texts=(tmp_path / "texts.txt",))
    run_study(check_study(NAME, setting, tmp_path), lambda line: None)
    rows = read_rows(tmp_path / f"{NAME}-small" / "rows.csv")
    loss = {(row.method, row.n): row.value for row in rows if row.quantity == study.LOSS and not row.fact("after")}
    # The first block is in every window.
    for name in study.ATTENTIONS:
        assert loss[name, 128] == pytest.approx(loss[study.EXACT, 128], abs=1e-5)
    tables = study.STUDIES[NAME].tables(rows)
    assert [len(table.lines) for table in tables] == [4, 2, 6, 4]
    assert len(study.STUDIES[NAME].verdicts(rows)) == 5
    assert study.STUDIES[NAME].figures(rows, tmp_path)


@pytest.mark.refuses
def test_texts_without_long_documents_are_refused(tmp_path):
    (tmp_path / "short.txt").write_text("a few words\n" * 100)
    with pytest.raises(ValueError, match=r"has 0 lines of more than 20,480 characters.*--texts"):
        check_study(NAME, Setting(texts=(tmp_path / "short.txt",)), tmp_path)


def test_dropped_tokens_are_seen_by_nobody():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 512, 16) for _ in range(3))
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for attend in study.ATTENTIONS.values():
        out = attend(q, k, v)
        # Two blocks are in every window.
        assert_close(out[:, :, :128], exact[:, :, :128])
        assert not torch.allclose(out[:, :, 400:], exact[:, :, 400:])
    shown = torch.eye(512)[None, None].expand(1, 2, -1, -1)
    for attend in (study.window_with_sinks, study.heavy_hitters):
        seen = (attend(q, k, shown) > 0).sum(dim=-1)
        assert seen.max() <= study.CACHE
    assert (study.near_far(q, k, shown) > 0).sum(dim=-1).max() == 512


def row(quantity, method, value, low=None, high=None, after="", n=2048):
    return Row(
        study=NAME, quantity=quantity, method=method, value=value, unit="", low=low, high=high, n=n,
        facts={"after": after}, device="cpu",
    )  # fmt: skip


OTHERS = (study.WINDOW, study.HEAVY)


def rows_of(window, apart, trained, found, times):
    rows = [row(study.MORE, name, window[0], *window[1:]) for name in (*OTHERS, study.OURS)]
    rows += [row("loss - near_far", name, apart[0], *apart[1:]) for name in OTHERS]
    rows.append(row(study.MORE, study.OURS, trained[0], *trained[1:], after=study.TRAINED))
    ratio = study.TIMES["forward"][1]
    rows += [row(ratio, study.OURS, times[0], n=n) for n in (4096, 8192)]
    rows.append(row(ratio, study.NOT_CAUSAL, times[1], n=8192))
    names = (study.EXACT, study.OURS, study.WINDOW)
    return rows + [row(study.FOUND, name, share, n=4096) for name, share in zip(names, found, strict=True)]


@pytest.mark.parametrize(
    ("window", "apart", "trained", "found", "times", "wanted"),
    [
        ((0.1, 0.05, 0.15), (0.08, 0.04, 0.1), (0.01, 0.0, 0.015), (1, 1, 0), (0.6, 0.5), [True] * 5),
        ((0.1, 0.05, 0.15), (-0.08, -0.1, -0.04), (0.1, 0.05, 0.15), (1, 0.2, 0), (0.6, 0.3), [False] * 5),
        # The model makes no use of the past; the difference is noise; exact attention finds nothing.
        ((0.0, -0.01, 0.01), (0.08, 0.04, 0.1), (0.02, 0.0, 0.04), (0.1, 0.1, 0.1), (1.1, 1),
         [None, None, None, False, None]),
        ((0.1, 0.05, 0.15), (0.01, -0.04, 0.1), (0.01, 0.0, 0.015), (1, 1, 1), (0.6, 0.5),
         [None, None, True, True, False]),
    ],
)  # fmt: skip
def test_verdicts_agree_disagree_and_cannot_tell(window, apart, trained, found, times, wanted):
    verdicts = study.STUDIES[NAME].verdicts(rows_of(window, apart, trained, found, times))
    assert [verdict.agrees for verdict in verdicts] == wanted


@pytest.mark.parametrize(
    ("ratios", "agrees"),
    [((1.04, 0.9, 0.5), True), ((1.06, 0.9, 0.5), False), ((1.0, 1.02, 0.5), False), ((1.0, 0.9, 0.8), False)],
)
def test_it_must_be_faster_from_4096_tokens_on(ratios, agrees):
    ratio = study.TIMES["forward"][1]
    rows = [row(ratio, study.OURS, value, n=n) for n, value in zip((2048, 4096, 8192), ratios, strict=True)]
    verdicts = study.STUDIES[NAME].verdicts([*rows, row(ratio, study.NOT_CAUSAL, 0.5, n=8192)])
    assert verdicts[3].agrees is agrees


@pytest.mark.parametrize(("low", "high", "agrees"), [(0.97, 1.02, None), (0.9, 0.99, True), (1.01, 1.1, False)])
def test_a_ratio_within_its_spread_of_one_cannot_tell(low, high, agrees):
    ratio = study.TIMES["forward"][1]
    rows = [row(ratio, study.OURS, (low + high) / 2, low, high, n=4096), row(ratio, study.OURS, 0.5, n=8192)]
    verdicts = study.STUDIES[NAME].verdicts([*rows, row(ratio, study.NOT_CAUSAL, 0.4, n=8192)])
    assert verdicts[3].agrees is agrees
