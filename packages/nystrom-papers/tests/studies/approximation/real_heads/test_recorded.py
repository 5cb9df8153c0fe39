import pytest

from nystrom_papers.studies.approximation.real_heads.recorded import find_heads, shown_heads
from nystrom_papers.studies.reproduce.study import Setting


def test_the_six_heads_are_spread_over_the_model():
    assert shown_heads(6, 12) == [(layer, 6) for layer in range(6)]
    assert shown_heads(12, 12) == [(layer, 0) for layer in range(1, 12, 2)]
    assert shown_heads(1, 4) == [(0, head) for head in range(4)]
    assert len(set(shown_heads(3, 4))) == 6


def test_what_cannot_run_is_one_line(tiny_bert, prose):
    with pytest.raises(ValueError, match="BERT-base: name its folder with --model"):
        find_heads(Setting(size="paper", texts=(prose,)))
    with pytest.raises(ValueError, match="expected at least 5120, for 10 x 512: name more or longer files"):
        find_heads(Setting(size="paper", model=tiny_bert, texts=(prose,)))
    plan = find_heads(Setting(model=tiny_bert, texts=(prose,))).plan([], (64,))
    assert plan.differs == "tiny-bert instead of BERT-base, 2 texts"
    paper = find_heads(Setting(size="paper", model=tiny_bert, texts=(prose, prose)))
    assert paper.texts == 10
    assert paper.plan([], (64,)).differs.startswith("tiny-bert instead of BERT-base, windows of ")
