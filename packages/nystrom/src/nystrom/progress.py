"""Progress of work that may take more than ten seconds, with an estimate of the time left.

On a terminal, a bar on standard error disappears when the work is done. Elsewhere, in a file or a pipe, a line is
printed after ten seconds and then every twenty, such as "layers: 12 of 48, 30 s, about 2 min left".
"""

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

from nystrom.printable import printable

Item = TypeVar("Item")

# Seconds: before a bar, before the first line, between lines, and between updates within a step.
_BAR, _FIRST, _BETWEEN, _BEAT = 1, 10, 20, 0.5
_BYTES, _STEPS = "B", "steps"


class Progress:
    """The progress of some work; as a context manager, it removes the bar at the end.

    Args:
        what: The work, in a few words.
        total: Amount of work; None if it is not known.
        unit: Unit of the work, such as "files"; "B" for bytes, shown in megabytes.
        initial: Amount that was done before.
    """

    def __init__(self, what: str, total: int | None = None, *, unit: str = "", initial: int = 0, shown: bool = True):
        what = printable(what)
        self.what, self.total, self.unit, self.done, self._before = what, total, unit, initial, initial
        self._bar = tqdm(
            desc=what,
            total=total,
            unit=unit if unit == _BYTES else f" {unit}",
            unit_scale=unit == _BYTES,
            initial=initial,
            leave=False,
            delay=_BAR,
            dynamic_ncols=True,
            disable=None if shown else True,
        )
        self._lines = shown and not sys.stderr.isatty()
        self._began = time.monotonic()
        self._due = self._began + _FIRST

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

    def update(self, done: int = 1) -> None:
        """Count work that was done."""
        self.done += done
        self._bar.update(done)
        if self._is_due():
            self._say(self._line())

    def expect(self, total: int) -> None:
        """Set the total, if it becomes known only later."""
        self.total = self._bar.total = total

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """Iterate over items, counting each when the next is requested; removes the bar at the end."""
        with self:
            for item in items:
                yield item
                self.update()

    def print(self, text: str) -> None:
        """Print a line of results above the bar; without a bar, it takes the place of a line of progress."""
        if self._lines:
            print(text, flush=True)
            self._due = time.monotonic() + _BETWEEN
        else:
            tqdm.write(text)

    @contextmanager
    def doing(self, step: str) -> Iterator[None]:
        """One part of the work whose own progress is unknown: its seconds are shown meanwhile, and it counts as one.

        The time left is estimated from the parts before, as long as this one takes no longer than their mean, and
        unless the unit is "steps": those may differ too much in length.
        """
        began, ended = time.monotonic(), threading.Event()
        self._due = began + _FIRST

        def beat() -> None:
            while not ended.wait(_BEAT):
                self._show_step(step, time.monotonic() - began)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._bar.clear()
        seconds = time.monotonic() - began
        if self._lines and seconds >= _FIRST:
            self._say(f"{self.what}: {step} took {duration(seconds)}")
        self.done += 1

    def _show_step(self, step: str, seconds: float) -> None:
        if not self._is_due() and (self._bar.disable or seconds < _BAR):
            return
        done, before = self.done - self._before, time.monotonic() - self._began - seconds
        line = (
            f"{self.what}: {step}, {self.unit.removesuffix('s')} {self.done + 1} of {self.total}, {duration(seconds)}"
        )
        # A piece that takes longer than the mean of those before has no estimate: it would be negative.
        if self.total is not None and done and self.unit != _STEPS and seconds <= before / done:
            line += f", about {duration(before / done * (self.total - self.done) - seconds)} left"
        if self._lines:
            self._say(line)
        else:
            self._bar.display(line)

    def _is_due(self) -> bool:
        return self._lines and time.monotonic() >= self._due

    def _say(self, line: str) -> None:
        self._due = time.monotonic() + _BETWEEN
        print(line, file=sys.stderr, flush=True)

    def _line(self) -> str:
        seconds = time.monotonic() - self._began
        size, unit = (1e6, "MB") if self.unit == _BYTES else (1, self.unit)
        done = f"{self.done / size:.0f}" if self.total is None else f"{self.done / size:.0f} of {self.total / size:.0f}"
        parts = [f"{done} {unit}".rstrip(), duration(seconds)]
        if self.total is not None and self._before < self.done < self.total:
            left = seconds / (self.done - self._before) * (self.total - self.done)
            parts.append(f"about {duration(left)} left")
        return f"{self.what}: {', '.join(parts)}"


def duration(seconds: float) -> str:
    """A rounded number of seconds, minutes or hours."""
    unit, name = next(
        (unit, name) for unit, name in ((3600, "h"), (60, "min"), (1, "s")) if seconds >= 1.5 * unit or unit == 1
    )
    return f"{seconds / unit:.1f} {name}" if unit == 3600 else f"{seconds / unit:.0f} {name}"
