"""A machine whose compiler is a script: it copies a library, and counts how often it is called."""

import ctypes
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nystrom import native, native_library
from nystrom.attention.fused import fused_softmax, softmax_rows

COMPILER = """#!/bin/sh
case "$*" in *--version) echo version 1; exit;; esac
cat > /dev/null
echo compiled >> {folder}/log
{first}
for last; do :; done
cp {folder}/library "$last"
"""


class Machine:
    """The compiler, a folder for what it makes, and this process, which has settled nothing."""

    script = COMPILER

    def __init__(self, folder: Path, library: bytes, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.library, self.monkeypatch = folder, library, monkeypatch
        self.cache = folder / "cache" / "nystrom"
        (folder / "library").write_bytes(library)
        self.write_compiler()
        monkeypatch.setenv("CXX", str(folder / "c++"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        monkeypatch.setenv("NYSTROM_NATIVE", "1")
        self.forget()

    def write_compiler(self, first: str = "", script: str = COMPILER) -> None:
        """Replace the script; it runs the line `first` before it copies."""
        compiler = self.folder / "c++"
        compiler.write_text(script.format(folder=self.folder, first=first))
        compiler.chmod(0o700)

    def forget(self) -> None:
        """Make this process as one that has settled nothing."""
        self.monkeypatch.setattr(native_library, "_settled", {})
        native_library._compiled.cache_clear()

    def times_compiled(self) -> int:
        log = self.folder / "log"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def file(self) -> Path:
        """The library that the folder keeps."""
        (file,) = self.cache.glob("native-*.so")
        return file

    def make(self) -> Path:
        """The library in its folder, by another process."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ctypes, "CDLL", lambda _: None)
            native.status()
        self.forget()
        return self.file()

    def check_numbers(self) -> None:
        """One loop forward and backward, if loops run, against operators of torch."""
        q, k = (torch.randn(1, 2, n, 4, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (1024, 5))
        found, expected = fused_softmax(q, k, k), softmax_rows(q, k) @ k
        torch.testing.assert_close(found, expected)
        for ours, theirs in zip(*(torch.autograd.grad(x.sum(), (q, k)) for x in (found, expected)), strict=True):
            torch.testing.assert_close(ours, theirs)

    def problems(self) -> list[str]:
        """The warnings of a call."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self.check_numbers()
        return [str(warning.message) for warning in said]

    def fork(self, call: Callable[[], object]) -> int:
        """Call a function in a forked child, which ends if it hangs."""
        with warnings.catch_warnings():
            # torch has threads, which the child does without.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child:
            return child
        signal.alarm(120)
        code = 1
        try:
            call()
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)

    def wait(self, child: int) -> None:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def run(self, way: str, check: Callable[[], object]) -> None:
        if way == "forked child":
            self.wait(self.fork(check))
        else:
            check()


@pytest.fixture(scope="session")
def library():
    """The library that the machine's compiler makes of native.cpp, without the checksum."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NYSTROM_NATIVE", "1")
        file = native.status().file
    if file is None:
        pytest.skip("no C++ compiler, or no folder for what it makes, here")
    return file.read_bytes()[:-32]


@pytest.fixture
def machine(tmp_path, library, monkeypatch):
    if os.name != "posix":
        pytest.skip("the loops need a POSIX system")
    return Machine(tmp_path, library, monkeypatch)


@pytest.fixture
def loaded(monkeypatch):
    """The contents of each library at the moment that it is loaded."""
    contents, load = [], ctypes.CDLL

    def spy(name, *rest, **named):
        if name is not None:
            contents.append(Path(name).read_bytes())
        return load(name, *rest, **named)

    monkeypatch.setattr(ctypes, "CDLL", spy)
    return contents
