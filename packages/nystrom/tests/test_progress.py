"""Work says how far it is: not at once, not often, and with an estimate of what is left."""

import io
import sys
import time
from types import SimpleNamespace

import pytest

from nystrom import progress
from nystrom.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [1000.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_in_a_pipe_there_is_a_line_after_ten_seconds_and_then_one_every_twenty(clock, capsys):
    with Progress("layers", 100, unit="runs") as work:
        for _ in range(60):
            clock[0] += 1
            work.update()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "layers: 10 of 100 runs, 10 s, about 2 min left",
        "layers: 30 of 100 runs, 30 s, about 70 s left",
        "layers: 50 of 100 runs, 50 s, about 50 s left",
    ]


def test_work_of_less_than_ten_seconds_says_nothing(clock, capsys):
    for item in Progress("files", 9).over(range(9)):
        clock[0] += 1
        assert item < 9
    assert capsys.readouterr().err == ""


def test_what_was_done_before_does_not_count_for_the_pace(clock, capsys):
    with Progress("training", 100, unit="steps", initial=80) as work:
        clock[0] += 20
        work.update(10)
    assert capsys.readouterr().err == "training: 90 of 100 steps, 20 s, about 20 s left\n"


def test_without_a_total_there_is_no_estimate_and_bytes_are_megabytes(clock, capsys):
    for total, said in ((None, "a: 3 MB, 15 s\n"), (6_000_000, "a: 3 of 6 MB, 15 s, about 15 s left\n")):
        with Progress("a", total, unit="B") as work:
            clock[0] += 15
            work.update(3_000_000)
        assert capsys.readouterr().err == said


def test_a_total_may_become_known_later(clock, capsys):
    with Progress("layers") as work:
        work.update(2)
        work.expect(4)
        clock[0] += 10
        work.update()
    assert capsys.readouterr().err == "layers: 3 of 4, 10 s, about 3 s left\n"


def test_nothing_is_shown_where_nothing_is_asked_for(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    for _ in Progress("files", 2, shown=False).over(range(2)):
        clock[0] += 60
    assert screen.getvalue() == capsys.readouterr().err == ""


def test_a_line_of_results_stands_for_one_of_progress(clock, capsys):
    with Progress("training", 100) as work:
        clock[0] += 9
        work.print("step 1")
        clock[0] += 19
        work.update()
        clock[0] += 1
        work.update()
    said = capsys.readouterr()
    assert said.out == "step 1\n"
    assert said.err == "training: 2 of 100, 29 s, about 24 min left\n"


def eventually(said, screen, seconds=60.0):
    """Wait for another thread to write something."""
    end = time.perf_counter() + seconds
    while said not in screen():
        assert time.perf_counter() < end, screen()
        time.sleep(0.01)


def test_a_step_without_a_fraction_says_its_seconds_meanwhile_and_what_it_took(clock, monkeypatch):
    monkeypatch.setattr(progress, "_BEAT", 0.01)
    monkeypatch.setattr(sys, "stderr", screen := io.StringIO())
    with Progress("export", 2, unit="steps") as work:
        with work.doing("tracing"):
            clock[0] += 12
            eventually("export: tracing, step 1 of 2, 12 s\n", screen.getvalue)
            clock[0] += 3
        with work.doing("comparing"):
            clock[0] += 1
    assert screen.getvalue().splitlines() == ["export: tracing, step 1 of 2, 12 s", "export: tracing took 15 s"]


def test_parts_tell_what_is_left(clock, monkeypatch):
    monkeypatch.setattr(progress, "_BEAT", 0.01)
    monkeypatch.setattr(sys, "stderr", screen := io.StringIO())
    with Progress("study", 4, unit="parts", initial=1) as work:
        with work.doing("a"):
            clock[0] += 40
        with work.doing("b"):
            clock[0] += 15
            # One part took 40 s, two are left of which one is 15 s old.
            eventually("study: b, part 3 of 4, 15 s, about 65 s left\n", screen.getvalue)
            clock[0] += 30
            # It takes longer than the one before: how long is not known.
            eventually("study: b, part 3 of 4, 45 s\n", screen.getvalue)


def test_a_step_that_fails_ends_what_is_shown(monkeypatch, clock):
    with pytest.raises(ValueError, match="broken"), Progress("export", 1) as work, work.doing("tracing"):
        raise ValueError("broken")


def test_on_a_terminal_there_is_a_bar_that_goes(monkeypatch):
    monkeypatch.setattr(progress, "_BAR", 0)
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    for _ in Progress("layers", 3, unit="runs").over(range(3)):
        pass
    assert "layers:   0%" in screen.getvalue()
    assert "\n" not in screen.getvalue()
    assert screen.getvalue().endswith("\r")


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "0 s"), (89, "89 s"), (91, "2 min"), (5399, "90 min"), (9000, "2.5 h")]
)
def test_durations_are_rounded(seconds, said):
    assert duration(seconds) == said
