import pytest
import torch

from nystrom_lab.studies.approximation.real_heads.recorded import find_heads, shown_heads
from nystrom_lab.studies.reproduce.study import Setting


def test_the_six_heads_are_spread_over_the_model():
    assert shown_heads(6, 12) == [(layer, 6) for layer in range(6)]
    assert shown_heads(12, 12) == [(layer, 0) for layer in range(1, 12, 2)]
    assert shown_heads(1, 4) == [(0, head) for head in range(4)]
    assert len(set(shown_heads(3, 4))) == 6


def test_each_layer_is_a_part_and_initialised_weights_show_no_heads(tiny_setting):
    real = find_heads(tiny_setting)
    assert (real.texts, real.encoder.layers) == (2, 3)
    layers = real.layers("pretrained")
    assert [(heads.layer, heads.shown) for heads in layers] == [(0, (1, 3)), (1, (1, 3)), (2, (1, 3))]
    assert layers[0].q.shape == (2, 4, 512, 8)
    assert layers[0].q.dtype == torch.float64
    assert all(heads.shown == () for heads in real.layers("initialised"))
    names = [part.name for part in real.by_layer(lambda heads, folder: [])]
    assert names == [f"{weights}-layer={layer}" for weights in ("pretrained", "initialised") for layer in range(3)]


def test_the_softmax_matrix_is_the_dense_formula(tiny_setting):
    (heads,) = find_heads(tiny_setting, small_texts=1).layers("pretrained", (1,))
    scores = heads.q @ heads.k.mT / 8**0.5
    torch.testing.assert_close(heads.softmax(), scores.exp() / scores.exp().sum(-1, keepdim=True))


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
