"""The laws of kernels take most of the suite's time where they are interpreted: `make check` has them."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of the backend "triton" as long."""
    for item in items:
        values = (
            item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        )
        if any(isinstance(value, dict) and value.get("backend") == "triton" for value in values):
            item.add_marker(pytest.mark.long)
