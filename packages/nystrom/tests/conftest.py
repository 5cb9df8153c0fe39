"""Fixtures of the library's tests."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", params=["loops of our own", "operators of torch"])
def of_a_cpu(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways to compute on a CPU that has a compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NYSTROM_NATIVE", str(int(request.param == "loops of our own")))
        yield request.param
