"""Labels that are numbers."""

import re

from hypothesis import given
from hypothesis import strategies as st

from nystrom_lab.data.sources.source import NUMBER

# Where no dot follows, the digits can be shared between its two parts in as many ways as there are digits.
QUADRATIC = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)


@given(st.text(alphabet="+-.eE01_x"))
def test_a_number_is_what_it_was_and_each_has_one_reading(text):
    assert bool(NUMBER.fullmatch(text)) == bool(QUADRATIC.fullmatch(text))
    # The second part begins with a dot or is empty.
    if found := NUMBER.match(text):
        assert (found[2] or ".")[0] == "."
