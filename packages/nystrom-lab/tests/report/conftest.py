import pytest
from matplotlib.figure import Figure


@pytest.fixture
def drawn(monkeypatch):
    """The saved figures."""
    figures, save = [], Figure.savefig

    def keep(figure, *where, **how):
        figures.append(figure)
        save(figure, *where, **how)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures
