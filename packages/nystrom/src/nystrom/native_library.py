r"""The loops of `native.cpp`, compiled once for a machine and loaded from a file that is whole and ours.

`CXX`, or c++, compiles them in about two seconds, in one thread of one process, into `~/.cache/nystrom` (or that of
`XDG_CACHE_HOME`, if absolute). The name of a library is a hash of the source (`native.cpp`, or that and a file that
stands on it), the compiler and its options, the processor and the C library. It ends in a checksum, and is loaded if
that is right, and if file and folder belong to this user and no other may write to them; otherwise it is compiled anew.
If the folder cannot be used, each process compiles for itself. A process settles this once for each dtype and source,
and warns once.
"""

import ctypes
import errno
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import torch

from nystrom.temporary import scratch_folder
from nystrom.whole_files import whole_bytes

# Flags of gcc and clang for each capability of a processor that torch reports.
_FLAGS = {
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"),
}
_NAMES = {torch.float32: "float", torch.float64: "double"}
_lock = threading.Lock()

if sys.platform != "win32":
    import fcntl

    # A thread of the parent may hold the lock, which ends with the fork.
    os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock()))


class Loops(NamedTuple):
    """The loops in a dtype, the file that keeps them, and what there is to warn of."""

    library: ctypes.CDLL | None = None
    file: Path | None = None
    problem: str = ""


_settled: dict[tuple[torch.dtype, str], Loops] = {}


def loops(dtype: torch.dtype, more: str = "") -> Loops:
    """The loops in float32 or float64, if they can be had; `more` is a file of source that stands on `native.cpp`."""
    wanted = dtype, more
    if wanted not in _settled:
        with _lock:
            silent = wanted in _settled or any(others.problem for others in _settled.values())
            if wanted not in _settled:
                _settled[wanted] = _settle(dtype, more)
        problem = _settled[wanted].problem
        # Once all is settled, since a filter may raise it.
        if problem and not silent:
            warnings.warn(problem, RuntimeWarning, stacklevel=2)
    return _settled[wanted]


def _settle(dtype: torch.dtype, more: str) -> Loops:
    compiler = os.environ.get("CXX", "c++")
    words = compiler.split()
    if sys.platform == "win32" or not words or shutil.which(words[0]) is None:
        return Loops()
    try:
        return _load(words, dtype, more)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no thread can be started
        lines = (getattr(error, "stderr", None) or b"").decode(errors="replace").split("\n")
        problem = (
            f"{compiler} could not make the loops of nystrom for this CPU, so torch's operators run, which are slower: "
            f"{lines[0].strip() or error}. Set CXX to a compiler of C++17, or NYSTROM_NATIVE=0 to be asked no more."
        )
        return Loops(problem=problem)


def _load(words: list[str], dtype: torch.dtype, more: str) -> Loops:
    # The compiler reads these bytes, of which the key is a hash; they may lie in an archive.
    source = b"".join(files("nystrom").joinpath(name).read_bytes() for name in ("native.cpp", more) if name)
    version = subprocess.run([*words, "--version"], capture_output=True, timeout=60).stdout
    capability = torch.backends.cpu.get_cpu_capability()
    options = "-std=c++17", "-O3", f"-DREAL={_NAMES[dtype]}", "-shared", "-fPIC", "-pthread"
    command = *words, *options, *_FLAGS.get(capability, ()), "-x", "c++", "-"
    facts = source, command, version, capability, platform.machine(), platform.libc_ver()
    key, home = hashlib.sha256(repr(facts).encode()).hexdigest()[:32], os.environ.get("XDG_CACHE_HOME", "")
    cache = None
    try:
        cache = (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "nystrom"
        with _our_folder(cache) as folder:
            return Loops(_load_from(folder, key, command, source), cache / f"native-{key}.so")
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        why = getattr(error, "strerror", None) or error
        problem = (
            f"{cache or 'The cache folder'} cannot keep the loops of nystrom ({why}), so each process compiles them, "
            "which takes seconds: set XDG_CACHE_HOME to a folder that you, and no other user, may write to."
        )
    with scratch_folder() as folder:
        return Loops(_load_from(folder, key, command, source), None, problem)


def _load_from(folder: Path, key: str, command: tuple[str, ...], source: bytes) -> ctypes.CDLL:
    path = folder / f"native-{key}.so"
    if library := _loaded(path, key):
        return library
    with _one_process(folder / "lock"):
        if library := _loaded(path, key):
            return library
        content = _compiled(command, source)
        # A file that is written whole would keep the mode of the one before it.
        path.unlink(missing_ok=True)
        with whole_bytes(path) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(content + _checksum(key, content))
        return ctypes.CDLL(str(path))


def _loaded(path: Path, key: str) -> ctypes.CDLL | None:
    """The loops of a file; None if it is not there, a link, not ours, not whole, or does not load."""
    # Follow no link, and wait for no pipe.
    with suppress(OSError), open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        content = file.read() if stat.S_ISREG(status.st_mode) and _is_ours(status) else b""
        if content[-32:] == _checksum(key, content[:-32]):
            return ctypes.CDLL(str(path))
    return None


def _checksum(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()


@functools.cache
def _compiled(command: tuple[str, ...], source: bytes) -> bytes:
    with scratch_folder() as folder:
        made = folder / "native.so"
        subprocess.run([*command, "-o", str(made)], input=source, check=True, capture_output=True, timeout=300)
        return made.read_bytes()


@contextmanager
def _our_folder(folder: Path) -> Iterator[Path]:
    """A folder that only this user may write to, by a path that stays its own if others rename folders above it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not _is_ours(os.fstat(descriptor)):
            raise PermissionError(errno.EPERM, "another user owns it, or may write to it")
        fixed = Path(f"/proc/self/fd/{descriptor}")
        yield fixed if fixed.exists() else folder
    finally:
        os.close(descriptor)


@contextmanager
def _one_process(lock: Path) -> Iterator[None]:
    """Work that one process does at a time; where it takes longer than a second, a line says so."""
    note = threading.Timer(1, print, ["nystrom: compiling the loops for this CPU, once"], {"file": sys.stderr})
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        note.start()
        # Unlike that of flock, a child that is forked meanwhile does not hold this lock. Some file systems have none.
        with suppress(OSError):
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        note.cancel()
        os.close(descriptor)


def _is_ours(status: os.stat_result) -> bool:
    """Whether this user owns a file or folder, and neither a group nor others may write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
