import pytest

from nystrom_lab.training.presets import DataSizes
from nystrom_papers.studies.stability.arena import ArenaTask


@pytest.fixture
def listops(data):
    """48 + 20 + 30 expressions of up to 40 tokens."""
    return ArenaTask("listops", data, DataSizes(folder="listops", train=48, val=20, test=30, max_length=64))


@pytest.fixture
def documents(pairs):
    """48 + 20 + 30 pairs of texts of up to 40 bytes."""
    return ArenaTask("retrieval", pairs, DataSizes(folder="retrieval", train=48, val=20, test=30, max_length=64))
