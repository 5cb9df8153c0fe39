"""The costs of a step on paper, beside numbers that were worked out by hand."""

import pytest

from nystrom.attention.registry import METHODS
from nystrom.parallel.exchanged import OVER_RANKS
from nystrom_lab.cli.main import main
from nystrom_lab.studies.parallel.costs import FLOPS, EncoderShape, Machine, plan_step
from nystrom_lab.studies.parallel.plan import run_plan

MACHINE = Machine(flops=1e12, utilisation=0.5, bandwidth=1e9, latency=1e-3, memory=1e9)
SHAPE = {"layers": 3, "width": 8, "heads": 2, "feed_forward": 32, "taps": 0}


def cost(method, *, ranks=4, tokens=1024, checkpointing=False, **options):
    shape = EncoderShape(**SHAPE, checkpointing=checkpointing)
    return plan_step(method, METHODS[method].options(**options), tokens, ranks, shape, MACHINE)


def test_nystrom_costs_what_its_formulas_say():
    step = cost("nystrom", num_landmarks=16)
    # Projections and feed-forward blocks, then attention of two heads of width 4 to 16 landmarks, and their inverse.
    forward = 3 * (256 * (8 * 64 + 4 * 8 * 32) + 2 * (8 * 256 * 16 * 4 + 8 * 6 * 16**3))
    assert step.compute == pytest.approx(3 * forward / 0.5e12)
    # Two sums of means, one of averages and one maximum, four bytes a number, one and a half times in a ring of four;
    # the backward pass has all but the maximum. 32 bytes of agreement to each of three.
    sums = 2 * 4 * 3 * 16 * 5
    sent = 3 * (1.5 * (2 * sums + 2 * 4 * 16) + 96)
    assert step.sent == pytest.approx(sent)
    weights = 1.5 * 4 * 3 * (4 * 64 + 2 * 8 * 32)
    # Five collectives forward and three backward in each of three layers, and one for the weights.
    assert step.communication == pytest.approx((sent + weights) / 1e9 + 25e-3)
    assert step.step == pytest.approx(step.compute + step.communication)
    assert step.memory == 16 * 3 * (4 * 64 + 2 * 8 * 32) + 3 * 256 * 34 * 8
    assert step.fits


def test_ring_attention_sends_all_keys_and_values_while_it_computes():
    step = cost("softmax")
    # Keys and values of 256 tokens to three others, two bytes a number; backward they and their gradients.
    assert step.sent == 3 * (3 * 2 * 256 * 8 * 2) * 3
    assert step.compute == pytest.approx(3 * 3 * (256 * 1536 + 2 * 4 * 256 * 1024 * 4) / 0.5e12)
    assert step.step < step.compute + step.communication
    assert step.attention == "ring attention"


def test_bytes_do_not_grow_with_tokens_but_for_exact_attention():
    for method in OVER_RANKS:
        short, long = (cost(method, tokens=tokens) for tokens in (4096, 16384))
        grown = 4 if method == "softmax" else 1
        assert long.sent == grown * short.sent, method
        assert long.compute > short.compute


def test_one_rank_sends_nothing():
    for method in OVER_RANKS:
        assert cost(method, ranks=1).sent == 0


def test_layers_that_are_computed_again_keep_their_input_alone():
    kept, again = cost("linear"), cost("linear", checkpointing=True)
    assert again.compute == pytest.approx(kept.compute * 4 / 3)
    assert kept.memory - again.memory == 3 * 256 * 34 * 8 - (3 * 256 * 2 * 8 + 256 * 34 * 8)


def test_every_method_over_ranks_has_formulas():
    assert set(FLOPS) == set(OVER_RANKS) == {name for name, method in METHODS.items() if method.over_ranks}


def test_the_command_prints_the_table_and_the_formulas(capsys):
    words = ["bench", "plan", "--tokens", "1M", "2048", "--ranks", "8", "--attention", "linear"]
    assert main(words) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert lines[0].split()[:3] == ["tokens", "GPUs", "attention"]
    assert [line.split()[:3] for line in lines[1:5]] == [
        ["1M", "8", "linear"],
        ["1M", "8", "ring"],
        ["2K", "8", "linear"],
        ["2K", "8", "ring"],
    ]
    assert "compute + communication" in said
    assert main([*words, "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("| tokens | GPUs |")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tokens": ("16X",)}, "an entry of tokens is '16X'; expected a number such as 65536, 64K or 16M"),
        ({"tokens": ("0M",)}, "an entry of tokens is '0M'"),
        ({"tokens": ()}, "tokens is empty"),
        ({"tokens": ("1000",), "ranks": (64,)}, "1000 tokens cannot be split evenly across 64 ranks"),
        ({"ranks": (0,)}, "an entry of ranks"),
        ({"attention": ("informer",)}, "informer"),
        ({"heads": 7}, "width is 768 and heads is 7"),
        ({"utilisation": 1.5}, "utilisation is 1.5; expected a share"),
        ({"bandwidth": 0.0}, "bandwidth is 0.0; expected a positive number"),
        ({"latency": -1.0}, "latency is -1.0"),
        ({"landmarks": 0}, "landmarks"),
        ({"taps": 33, "tokens": ("64",), "ranks": (8,)}, "a rank holds 8 tokens of 64, and its neighbours need 16"),
        ({"flops": float("nan")}, "flops is nan"),
    ],
)
def test_what_makes_no_sense_is_refused(asked, said):
    with pytest.raises(ValueError, match=said):
        run_plan(**asked)
