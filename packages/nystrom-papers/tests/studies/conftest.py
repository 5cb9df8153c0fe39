import pytest

from nystrom_papers.studies.reproduce.study import Setting


@pytest.fixture
def tiny_setting(tiny_bert, prose):
    return Setting(model=tiny_bert, texts=(prose,))
