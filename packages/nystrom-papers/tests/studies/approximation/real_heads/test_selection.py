from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.approximation.real_heads.selection import over_layers


def row_of(value, facts, quantity="error", **spread):
    return Row(study="", quantity=quantity, method="nystrom", value=value, unit="", device="cpu", facts=facts, **spread)


def test_layers_become_one_row_with_the_mean_of_all_heads():
    rows = [
        row_of(1.0, {"weights": "pretrained", "layer": 0}, low=0.5, high=2.0, repeats=4),
        row_of(3.0, {"weights": "pretrained", "layer": 1}, low=1.5, high=4.0, repeats=4),
        row_of(9.0, {"weights": "initialised", "layer": 0}),
    ]
    first, second = over_layers(rows)
    assert (first.value, first.low, first.high, first.repeats) == (2.0, 1.0, 3.0, 8)
    assert (first.words, second.words, second.value) == ("weights=pretrained", "weights=initialised", 9.0)
