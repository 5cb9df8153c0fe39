"""The study of slides: what is drawn, its rules, and a small one from end to end."""

import pytest
import torch

from nystrom_lab.measure.rows import Row, read_rows
from nystrom_papers.studies.fidelity import slides
from nystrom_papers.studies.reproduce.run import check_study, run_study
from nystrom_papers.studies.reproduce.study import Setting

NAME = "slides"
STUDY = slides.STUDIES[NAME]
TINY = slides.SlideSizes(side=12, slides=2, bags=4, small=10, epochs=1, seeds=1, lengths=(40,))


@pytest.mark.parametrize("together", [True, False])
def test_the_tumour_of_a_slide_is_together_or_scattered(together):
    slide = slides.draw_slide(24, torch.Generator().manual_seed(0), together=together)
    assert slide.features.shape == (len(slide.place), slides.FEATURES)
    assert int(slide.tumour.sum()) == slides.TUMOUR_TILES
    spread = slide.place[slide.tumour].double().std(dim=0).max()
    assert bool(spread < 3) is together
    # Rows of the file, one after the other.
    along = slide.place[:, 1] * 24 + slide.place[:, 0]
    assert (along.diff() > 0).all()


def test_orders_hold_every_tile_once():
    slide = slides.draw_slide(10, torch.Generator().manual_seed(0), together=True)
    for name in slides.ORDERS:
        order = slides.order_of(slide, name, torch.Generator().manual_seed(0))
        assert sorted(order.tolist()) == list(range(len(slide.place)))


@pytest.mark.long
def test_the_study_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(slides, "SMALL", TINY)
    monkeypatch.setattr(slides, "ROUNDS", 1)
    # A busy machine is no reason to leave one out.
    monkeypatch.setattr(slides, "LIMIT", float("inf"))
    run_study(check_study(NAME, Setting(), tmp_path), lambda line: None)
    rows = read_rows(tmp_path / f"{NAME}-small" / "rows.csv")
    assert {(row.method, row.fact("order")) for row in rows if row.quantity == slides.ERROR} == {
        (method, name) for method in (slides.NEAR_FAR, "nystrom-256") for name in slides.ORDERS
    }
    # Both are exact for so few tiles.
    assert all(row.value < 1e-5 for row in rows if row.quantity == slides.ERROR)
    assert [row.fact("order") for row in rows if row.quantity == slides.ACCURACY] == list(slides.ORDERS)
    orders, costs = STUDY.tables(rows)
    assert all(cell for line in orders.lines for cell in line)
    assert [line[:2] for line in costs.lines][:2] == [[slides.OURS, "forward"], [slides.OURS, "training"]]
    assert all("not measured" not in line[2] for line in costs.lines)
    assert len(STUDY.verdicts(rows)) == 5
    assert (tmp_path / f"{NAME}-small" / f"{NAME}.png").is_file()


def test_what_takes_too_long_is_not_measured(monkeypatch):
    monkeypatch.setattr(slides, "LIMIT", 0.0)
    rows = list(slides._measure_costs(40))
    assert {row.method for row in rows} >= {slides.OURS, slides.NEAR_FAR, slides.TORCH}
    assert all(row.value != row.value and "the limit is 0 s" in row.note for row in rows)


def row(quantity, value, method=slides.OURS, low=None, high=None, order="", n=10_000, repeats=400):
    return Row(
        study="", quantity=quantity, method=method, value=value, unit="", low=low, high=high, n=n, repeats=repeats,
        facts={"order": order}, device="a CPU",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "word"), [(0.1, 0.2, "agrees"), (-0.1, 0.2, "cannot tell"), (-0.2, -0.1, "does not agree")]
)
@pytest.mark.parametrize(("place", "method"), [(0, slides.NEAR_FAR), (1, "nystrom-256")])
def test_an_order_is_nearer_by_more_than_two_errors(low, high, word, place, method):
    rows = [row(slides.CLOSER, (low + high) / 2, method, low, high, order) for order in (slides.FILE, slides.SHUFFLED)]
    assert STUDY.verdicts(rows)[place].word == word
    assert STUDY.verdicts(rows)[1 - place].word == "cannot tell"


@pytest.mark.parametrize(
    ("shares", "word"),
    [
        ({slides.FILE: (0.8, 0.82), slides.CURVE: (0.9, 0.92), slides.SHUFFLED: (0.6, 0.62)}, "agrees"),
        # One training of three decides nothing.
        (
            {slides.FILE: (0.5, 0.5, 0.5), slides.CURVE: (0.99, 0.5, 0.5), slides.SHUFFLED: (0.5, 0.52, 0.5)},
            "cannot tell",
        ),
        ({slides.FILE: (0.98, 0.99), slides.CURVE: (0.8, 0.81), slides.SHUFFLED: (0.6, 0.61)}, "does not agree"),
        ({slides.FILE: (0.6, 0.61), slides.CURVE: (0.6, 0.61), slides.SHUFFLED: (0.9, 0.91)}, "does not agree"),
        ({slides.FILE: (0.6,), slides.CURVE: (0.9,), slides.SHUFFLED: (0.6,)}, "cannot tell"),
    ],
)
def test_accuracies_are_compared_with_their_spread_over_seeds(shares, word):
    rows = [row(slides.ACCURACY, share, order=order) for order, of_seeds in shares.items() for share in of_seeds]
    assert STUDY.verdicts(rows)[2].word == word


@pytest.mark.parametrize(
    ("low", "high", "word"), [(2, 3, "agrees"), (0.9, 1.2, "cannot tell"), (0.5, 0.9, "does not agree")]
)
@pytest.mark.parametrize(("place", "other"), [(3, slides.TORCH), (4, slides.PACKAGE)])
def test_times_are_decided_with_their_quartiles_from_10000_tiles_on(low, high, word, place, other):
    rows = [row(f"forward time / {slides.OURS}", (low + high) / 2, other, low, high)]
    assert STUDY.verdicts(rows)[place].word == word
    rows = [row(f"forward time / {slides.OURS}", (low + high) / 2, other, low, high, n=1000)]
    assert STUDY.verdicts(rows)[place].word == "cannot tell"
