import math
import re
from dataclasses import replace

import pytest

from nystrom.attention.registry import METHODS
from nystrom_papers.studies.approximation import complexity
from nystrom_papers.studies.approximation.complexity import STUDIES, count_rows, slope

STUDY = STUDIES["complexity"]


@pytest.fixture(scope="module")
def rows():
    sizes = {256: (8, 16), 512: (8, 16), 1024: (8,), 2048: (8,), 4096: (8,)}
    return [row for n, of in sizes.items() for row in count_rows(n, of)]


def only(rows, quantity, method, n, m=None):
    (row,) = (row for row in rows if (row.quantity, row.method, row.n, row.m) == (quantity, method, n, m))
    return row.value


@pytest.mark.long
def test_every_method_is_counted_at_each_of_its_sizes(rows):
    found = {(row.method, row.m) for row in rows if row.quantity == complexity.STORED}
    single = {"softmax", "softmax-materialised", "kernelized", "linear", "reformer", "bigbird"}
    expected = {(method, None) for method in single}
    expected |= {(method, m) for method in METHODS if method not in single for m in (8, 16)}
    assert found == expected
    assert all(row.value > 0 for row in rows)


def cost_of(words, letters):
    """The value of a cost such as "(n + s) m d + m^3": sums of products, whose factors stand side by side."""
    return total_of(iter(re.findall(r"\w+|[()+^]", words)), letters)


def total_of(tokens, letters):
    """The value of a sum, up to the bracket that closes it."""
    total, factors = 0.0, [1.0]
    for token in tokens:
        if token == ")":
            break
        if token == "+":
            total, factors = total + math.prod(factors), [1.0]
        elif token == "^":
            factors[-1] **= float(next(tokens))
        elif token == "log":
            factors.append(math.log(letters[next(tokens)]))
        elif token == "(":
            factors.append(total_of(tokens, letters))
        else:
            factors.append(float(token) if token.isdecimal() else letters[token])
    return total + math.prod(factors)


def test_the_costs_in_the_table_of_methods_have_the_counted_exponents_and_all_but_two_are_linear(rows):
    lengths, quadratic = (1024, 2048, 4096), {"softmax", "kernelized"}
    for method, of in METHODS.items():
        m = 8 if (method, 8) in {(row.method, row.m) for row in rows} else None
        counted = slope({n: only(rows, complexity.MULTIPLICATIONS, method, n, m) for n in lengths})
        numbers = {name: float(value) for name, value in vars(of.options()).items() if isinstance(value, int)}
        letters = {**numbers, "m": 8.0, "d": 64.0}
        stated = slope({n: cost_of(of.cost, letters | {"n": float(n), "s": float(n)}) for n in lengths})
        # Terms in m alone, and what is rounded to whole blocks, still weigh a little at these lengths.
        assert counted == pytest.approx(stated, abs=0.05), method
        assert counted <= 1.05 or method in quadratic, method


def agreeing():
    """Rows of lengths so long that every rule agrees."""
    rows = []
    template = next(iter(count_rows(64, ())))
    for n in (2**14, 2**15, 2**16):

        def row(quantity, method, value, m=None, n=n):
            return replace(template, quantity=quantity, method=method, value=float(value), n=n, m=m)

        rows.append(row(complexity.MULTIPLICATIONS, "softmax", 2 * n * n * 64))
        rows.append(row(complexity.MULTIPLICATIONS, "nystrom", 1000 * n, 8))
        rows.append(row(complexity.PAPER, "nystrom", 500 * n, 8))
        rows += [row(q, "nystrom", 100 * n, 8) for q in (complexity.STORED, complexity.PAPER_STORED)]
    return rows


@pytest.mark.parametrize(
    ("quantity", "method", "change", "disagreeing"),
    [
        (complexity.STORED, "nystrom", lambda row: row.value * row.n / 2**16, [0, 2]),
        # Many times the formula, and still of its order.
        (complexity.PAPER, "nystrom", lambda row: row.value / 20, []),
        (complexity.PAPER, "nystrom", lambda row: row.value / row.n**0.1, [1]),
        (complexity.PAPER_STORED, "nystrom", lambda row: row.value / row.n**0.1, [2]),
        # Less than linear is no worse than linear.
        (complexity.STORED, "nystrom", lambda row: row.value / row.n**0.2, []),
        (complexity.MULTIPLICATIONS, "softmax", lambda row: row.value / row.n, [3]),
    ],
)
def test_each_rule_decides_both_ways(quantity, method, change, disagreeing):
    assert [verdict.agrees for verdict in STUDY.verdicts(agreeing())] == [True] * 4
    of = (quantity, method)
    changed = [replace(row, value=change(row)) if (row.quantity, row.method) == of else row for row in agreeing()]
    assert [verdict.agrees for verdict in STUDY.verdicts(changed)] == [place not in disagreeing for place in range(4)]


@pytest.mark.parametrize(
    ("keep", "unknown"),
    [
        # Two lengths have no exponent.
        (lambda row: row.n < 2**16, [0, 1, 2, 3]),
        (lambda row: row.quantity != complexity.PAPER, [1]),
        (lambda row: row.quantity != complexity.PAPER_STORED, [2]),
        (lambda row: row.method != "softmax", [3]),
        (lambda row: row.method != "nystrom", [0, 1, 2]),
    ],
)
def test_without_the_rows_of_a_claim_its_rule_cannot_tell(keep, unknown):
    verdicts = STUDY.verdicts([row for row in agreeing() if keep(row)])
    assert [verdict.agrees for verdict in verdicts] == [None if place in unknown else True for place in range(4)]


def test_landmarks_that_are_not_far_below_the_length_cannot_tell():
    many = [replace(row, m=row.m and 2**10) for row in agreeing()]
    assert [verdict.agrees for verdict in STUDY.verdicts(many)] == [None, None, None, True]
