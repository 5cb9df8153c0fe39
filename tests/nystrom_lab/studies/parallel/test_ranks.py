"""Measurements of processes that share a sequence: one that is real, and what surrounds it."""

import math

import pytest

from nystrom.attention.registry import METHODS
from nystrom.parallel.exchanged import CutSizes, exchanged
from nystrom_lab.cli.main import main
from nystrom_lab.measure.rows import read_rows
from nystrom_lab.report.plots.study import draw_ranks
from nystrom_lab.studies.parallel import ranks
from nystrom_lab.studies.parallel.ranks import run_ranks

SMALL = {"heads": 2, "width": 4, "landmarks": 4}


@pytest.mark.timeout(300)
@pytest.mark.long
def test_two_processes_send_what_the_formulas_say_and_the_same_command_goes_on(tmp_path, monkeypatch):
    rows = run_ranks(lengths=(64,), methods=("linear",), processes=(2,), to=tmp_path, **SMALL)
    found = {row.quantity: row for row in rows}
    sizes = CutSizes(batch=1, heads=2, head_dim=4, tokens=64, ranks=2, itemsize=4)
    said = exchanged("linear", METHODS["linear"].options(), sizes)
    assert found["attention bytes sent"].value == (said.forward.total + said.backward.total) / 1e6
    assert 0 < found["attention forward time"].value < found["attention forward+backward time"].value
    # An interpreter with torch takes more than this.
    assert found["attention memory"].value > 50
    assert {(row.method, row.n, row.seed) for row in rows} == {("linear, 2 processes", 64, 0)}
    monkeypatch.setattr(ranks, "_measure", None)
    assert run_ranks(lengths=(64,), methods=("linear",), processes=(2,), to=tmp_path, **SMALL) == rows
    with pytest.raises(ValueError, match=r"ranks.csv holds rows with .*choose another --to"):
        run_ranks(lengths=(64,), methods=("linear",), processes=(2,), to=tmp_path, heads=4, width=4, landmarks=4)


@pytest.mark.timeout(300)
def test_what_takes_too_long_is_stopped_and_said(tmp_path):
    rows = run_ranks(
        lengths=(64,), methods=("linear",), processes=(2,), what="encoder", limit_seconds=0.01, to=tmp_path, **SMALL
    )
    assert [row.note for row in rows] == ["took longer than the limit of 0.01 s"] * 3
    assert all(math.isnan(row.value) for row in read_rows(tmp_path / "ranks.csv"))


def faked(case, asked):
    seconds = {name: [case.n**2 / 2**20] for name in ("forward time", "forward+backward time")}
    return {"seconds": seconds, "memory": 100.0, "bytes": 1000 * (case.processes - 1) * case.n}


def test_exact_attention_that_would_take_too_long_is_not_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ranks, "_measure", faked)
    words = ["bench", "ranks", "--lengths", "1024", "65536", "--methods", "softmax", "nystrom", "--to", str(tmp_path)]
    assert main([*words, "--limit-seconds", "10"]) == 0
    rows = read_rows(tmp_path / "ranks.csv")
    notes = {(row.method, row.n): row.note for row in rows}
    assert notes["softmax, 4 processes", 1024] == notes["nystrom, 4 processes", 65536] == ""
    assert notes["softmax, 1 process", 65536] == "one call would take about 4096 s, the limit is 10 s"
    assert "attention bytes sent" in capsys.readouterr().out
    assert (
        main(["report", "ranks", str(tmp_path / "ranks.csv"), "--markdown", "--figure", str(tmp_path / "a.png")]) == 0
    )
    assert (tmp_path / "a.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="rows hold no bytes that were sent"):
        draw_ranks(
            [row for row in rows if "1 process" in row.method and "process," not in row.quantity][:4],
            tmp_path / "b.png",
        )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"lengths": ()}, "lengths is empty"),
        ({"lengths": (63,)}, "63 tokens cannot be split evenly across 4 processes"),
        ({"processes": (0,)}, "an entry of processes"),
        ({"methods": ("informer",)}, "informer"),
        ({"methods": ("linformer",)}, "linformer"),
        ({"what": "step"}, "what is 'step'"),
        ({"dtype": "int8"}, "dtype"),
        ({"limit_seconds": 0.0}, "limit_seconds is 0"),
        ({"seed": -1}, "seed"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(tmp_path, asked, said):
    with pytest.raises(ValueError, match=said):
        run_ranks(to=tmp_path / "none", **{"lengths": (64,)} | asked)
    assert not (tmp_path / "none").exists()
