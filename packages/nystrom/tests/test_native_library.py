"""Whatever state the folder of the compiled loops is in, numbers are right, and nothing damaged or foreign is loaded.

A script that copies a library stands for the compiler, and counts how often it is called.
"""

import ctypes
import errno
import os
import platform
import signal
import stat
import tempfile
import threading
import time
import traceback
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from nystrom import native, native_library, whole_files
from nystrom.attention.fused import fused_softmax, softmax_rows
from nystrom.linalg.pinv import iterate

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the loops need a POSIX system")

COMPILER = """#!/bin/sh
case "$*" in *--version) echo version 1; exit;; esac
cat > /dev/null
echo compiled >> {folder}/log
{first}
for last; do :; done
cp {folder}/library "$last"
"""


class Machine:
    """A compiler, a folder for what it makes, and processes that have settled nothing."""

    def __init__(self, folder: Path, library: bytes, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.library, self.monkeypatch = folder, library, monkeypatch
        self.cache = folder / "cache" / "nystrom"
        (folder / "library").write_bytes(library)
        self.write_compiler()
        monkeypatch.setenv("CXX", str(folder / "c++"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        monkeypatch.setenv("NYSTROM_NATIVE", "1")
        self.forget()

    def write_compiler(self, first: str = "", text: str = COMPILER) -> None:
        compiler = self.folder / "c++"
        compiler.write_text(text.format(folder=self.folder, first=first))
        compiler.chmod(0o700)

    def forget(self) -> None:
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
        """The library in its folder, which this process has not loaded, nor settled anything."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ctypes, "CDLL", lambda _: None)
            native.status()
        self.forget()
        return self.file()


@pytest.fixture(scope="session")
def library():
    """What the machine's compiler makes of native.cpp, without the checksum."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NYSTROM_NATIVE", "1")
        file = native.status().file
    if file is None:
        pytest.skip("no C++ compiler here")
    return file.read_bytes()[:-32]


@pytest.fixture
def machine(tmp_path, library, monkeypatch):
    return Machine(tmp_path, library, monkeypatch)


def check_numbers():
    """One loop forward and backward, if loops run, against operators of torch."""
    q, k = (torch.randn(1, 2, n, 4, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (1024, 5))
    found, expected = fused_softmax(q, k, k), softmax_rows(q, k) @ k
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(*(torch.autograd.grad(out.sum(), (q, k)) for out in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def problems():
    """What one call warns of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check_numbers()
    return [str(warning.message) for warning in said]


def in_a_child(call):
    """Call a function in a forked child, which is ended if it hangs."""
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


def check_child(child):
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def hold(change):
    """A state of the file: what it holds is changed."""
    return lambda file: file.write_bytes(change(file.read_bytes(), file.stem.removeprefix("native-")))


def flipped(content, at):
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def whole(content, key):
    return content + native_library._checksum(key, content)


def belong_to_another(path):
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(path, 65534, -1)


def be_a_link(path):
    path.symlink_to(path.rename(path.with_name("elsewhere")))


def be_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


# The states of the file after which it is compiled again, into the folder.
DAMAGED = {
    "absent": Path.unlink,
    "cut": hold(lambda content, _: content[: len(content) // 2]),
    "cut to its checksum": hold(lambda content, _: content[-32:]),
    "flipped": hold(lambda content, _: flipped(content, len(content) // 2)),
    "flipped in the checksum": hold(lambda content, _: flipped(content, len(content) - 1)),
    "empty": hold(lambda *_: b""),
    # The machine in the header of ELF
    "of another machine": hold(lambda content, _: flipped(content, 18)),
    "of another key": hold(lambda content, key: whole(content[:-32], "another " + key)),
    "no library, though whole": hold(lambda _, key: whole(b"none", key)),
    "another user's": belong_to_another,
    "writable by a group": lambda file: file.chmod(0o660),
    "writable by others": lambda file: file.chmod(0o602),
    "a link": be_a_link,
    "a pipe": be_a_pipe,
}
WAYS = ["first call", "forked child", "-W error"]


@pytest.fixture
def loaded(monkeypatch):
    """What is loaded, as it is when it is loaded."""
    contents, load = [], ctypes.CDLL

    def spy(name, *rest, **named):
        if name is not None:
            contents.append(Path(name).read_bytes())
        return load(name, *rest, **named)

    monkeypatch.setattr(ctypes, "CDLL", spy)
    return contents


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("state", ["whole", *DAMAGED])
def test_a_file_is_loaded_if_it_is_whole_and_ours_and_made_anew_otherwise(state, way, machine, loaded):
    file = machine.make()
    if state != "whole":
        DAMAGED[state](file)

    def check():
        # Warnings are errors in the tests.
        check_numbers()
        check_numbers()
        assert native.status() == (True, file, "")
        assert loaded[-1][:-32] == machine.library
        assert {content[:-32] for content in loaded} <= {machine.library, b"none"}

    if way == "forked child":
        check_child(in_a_child(check))
    else:
        check()
    assert machine.times_compiled() == (1 if state == "whole" else 2)
    assert stat.S_IMODE(file.lstat().st_mode) == 0o600
    assert stat.S_ISREG(file.lstat().st_mode)
    assert file.read_bytes()[:-32] == machine.library


def be_full(code):
    def state(folder, monkeypatch):
        sync = whole_files.sync

        def without_room(path):
            if folder in (path.resolve(), path.resolve().parent):
                raise OSError(code, os.strerror(code))
            sync(path)

        monkeypatch.setattr(whole_files, "sync", without_room)

    return state


def be_another(_, monkeypatch):
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)


def be_a_file(folder, _):
    folder.rename(folder.with_name("elsewhere"))
    folder.touch()


# The states of the folder after which each process compiles for itself.
FOLDERS = {
    "another user's": be_another,
    "writable by a group": lambda folder, _: folder.chmod(0o770),
    "writable by others": lambda folder, _: folder.chmod(0o777),
    "a link": lambda folder, _: be_a_link(folder),
    "a file": be_a_file,
    "read-only": be_full(errno.EROFS),
    "full": be_full(errno.ENOSPC),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("state", FOLDERS)
def test_without_a_folder_of_its_own_a_process_compiles_for_itself_and_warns_once(
    state, way, machine, loaded, monkeypatch, tmp_path
):
    machine.make().unlink()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "temporary").mkdir()
    FOLDERS[state](machine.cache, monkeypatch)

    def check():
        if way == "-W error":
            with pytest.raises(RuntimeWarning, match="cannot keep the loops"):
                check_numbers()
        else:
            (problem,) = problems()
            assert str(machine.cache) in problem
            assert "XDG_CACHE_HOME" in problem
        check_numbers()
        runs, file, reason = native.status()
        assert (runs, file) == (True, None)
        assert "cannot keep the loops" in reason
        assert [content[:-32] for content in loaded] == [machine.library]

    if way == "forked child":
        check_child(in_a_child(check))
    else:
        check()
    assert machine.times_compiled() == 2
    assert list((tmp_path / "temporary").iterdir()) == []


BROKEN = '#!/bin/sh\ncase "$*" in *--version) exit;; esac\necho compiled >> {folder}/log\n{first}\nexit 1\n'


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cause", ["an error", "another encoding", "no output", "no source", "a full disk"])
def test_where_nothing_can_be_made_torch_computes_and_one_warning_says_why(cause, way, machine, monkeypatch, no_space):
    says = {"an error": "echo no such option >&2", "another encoding": r"printf 'no such option \\377\n' >&2"}
    if cause in says or cause == "no output":
        machine.write_compiler(says.get(cause, ""), BROKEN)
    if cause == "no source":
        monkeypatch.setattr(native_library, "files", lambda _: machine.folder / "log" / "nowhere")
    why = {"no output": "exit status 1", "no source": "No such file", "a full disk": "No space left"}

    def check():
        if way == "-W error":
            with pytest.raises(RuntimeWarning, match="could not make the loops"):
                check_numbers()
        else:
            (problem,) = problems()
            assert why.get(cause, "no such option") in problem
            assert "NYSTROM_NATIVE=0" in problem
        check_numbers()
        assert not native.status().runs
        # The other dtype has the same problem, which is known.
        assert not native.status(torch.float64).runs
        assert native.status(torch.float64).reason

    if way == "forked child":
        check_child(in_a_child(check))
    else:
        check()
    assert machine.times_compiled() == (0 if cause == "no source" else 2)


def test_without_a_compiler_torch_computes_in_silence(machine, monkeypatch):
    for compiler in ("", str(machine.folder / "none")):
        monkeypatch.setenv("CXX", compiler)
        machine.forget()
        check_numbers()
        assert native.status()[:2] == (False, None)
        assert "C++ compiler" in native.status().reason
    monkeypatch.setenv("NYSTROM_NATIVE", "0")
    assert native.status() == (False, None, "NYSTROM_NATIVE is 0")
    assert "bfloat16" in native.status(torch.bfloat16).reason


def test_the_source_may_lie_in_an_archive(machine, monkeypatch):
    with zipfile.ZipFile(machine.folder / "nystrom.zip", "w") as archive:
        archive.write(files("nystrom").joinpath("native.cpp"), "nystrom/native.cpp")
    monkeypatch.setattr(native_library, "files", lambda name: zipfile.Path(machine.folder / "nystrom.zip", f"{name}/"))
    assert native.status() == (True, machine.file(), "")


def test_the_folder_is_made_for_this_user_alone_and_a_relative_one_is_no_folder(machine, monkeypatch):
    native.status()
    assert stat.S_IMODE(machine.cache.stat().st_mode) == 0o700
    machine.forget()
    monkeypatch.setenv("HOME", str(machine.folder / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.chdir(machine.folder)
    assert native.status().file.parent == machine.folder / "home" / ".cache" / "nystrom"
    assert not (machine.folder / "relative").exists()


def test_a_user_without_a_home_compiles_for_the_process(machine, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    (problem,) = problems()
    assert "home directory" in problem
    assert native.status() == (True, None, problem)


def test_the_name_tells_source_compiler_machine_and_library_of_c(machine, monkeypatch, tmp_path):
    def file():
        machine.forget()
        return native.status().file

    made = [file(), file()]
    machine.write_compiler(text=COMPILER.replace("version 1", "version 2"))
    made.append(file())
    monkeypatch.setattr(platform, "machine", lambda: "another")
    made.append(file())
    monkeypatch.setattr(platform, "libc_ver", lambda: ("another", "1"))
    made.append(file())
    (tmp_path / "native.cpp").write_bytes(files("nystrom").joinpath("native.cpp").read_bytes() + b"\n")
    monkeypatch.setattr(native_library, "files", lambda _: tmp_path)
    made.append(file())
    assert made[0] == made[1]
    assert len(set(made)) == len(made) - 1


def test_two_processes_of_eight_threads_each_compile_once(machine):
    machine.write_compiler("sleep 0.2")

    def check():
        with ThreadPoolExecutor(8) as threads:
            said = list(threads.map(lambda _: native.status(), range(8)))
        assert said == [(True, machine.file(), "")] * 8

    for child in [in_a_child(check) for _ in range(2)]:
        check_child(child)
    assert machine.times_compiled() == 1
    check_numbers()
    assert machine.times_compiled() == 1


def test_where_files_cannot_be_locked_the_loops_are_made(machine, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.lockf", no_locks)
    assert native.status() == (True, machine.file(), "")


def test_a_child_that_is_forked_while_a_thread_compiles_waits_for_the_library_alone(machine):
    machine.write_compiler(f"until [ -e {machine.folder}/go ]; do sleep 0.01; done")
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(native.status)
        while not machine.times_compiled():
            time.sleep(0.01)
        child = in_a_child(check_numbers)
        (machine.folder / "go").touch()
        assert made.result().runs
    check_child(child)
    assert machine.times_compiled() == 1
    # A child of a process that has the loops
    check_child(in_a_child(check_numbers))


def test_a_long_compilation_is_told_in_one_line(machine, monkeypatch, capsys):
    class Later(threading.Timer):
        """The second is over when it begins."""

        def start(self):
            assert self.interval == 1
            self.function(*self.args, **self.kwargs)

    monkeypatch.setattr(threading, "Timer", Later)
    native.status()
    assert capsys.readouterr() == ("", "nystrom: compiling the loops for this CPU, once\n")
    machine.forget()
    native.status()
    assert capsys.readouterr() == ("", "")


def test_a_backward_pass_goes_through_after_the_loops_were_switched_off(machine, monkeypatch):
    # Rows of unequal sums: of equal ones, rounding would choose that whose gradient counts.
    a = torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    q, k = torch.randn(1, 1, 1024, 4, requires_grad=True), torch.randn(1, 1, 5, 4)
    outputs = fused_softmax(q, k, k), iterate(a, None, 3)
    assert native.status().runs
    monkeypatch.setenv("NYSTROM_NATIVE", "0")
    expected = softmax_rows(q, k) @ k, iterate(a, None, 3)
    for ours, theirs, x in zip(outputs, expected, (q, a), strict=True):
        (found,), (wanted,) = (torch.autograd.grad(out.sum(), x) for out in (ours, theirs))
        torch.testing.assert_close(found, wanted)


def test_a_loop_refuses_a_tensor_of_another_device(machine):
    q, k = torch.randn(1, 1, 1024, 4), torch.randn(1, 1, 5, 4)
    with pytest.raises(ValueError, match="landmarks_forward got a tensor on meta: the loops take tensors on the CPU"):
        native.run_landmarks("landmarks_forward", q=q, landmarks=k, middle=k.to("meta"), out=torch.empty_like(q))
    a = torch.eye(5)[None]
    with pytest.raises(ValueError, match="iterate_forward got a tensor on meta"):
        native.run_iteration(a, a.to("meta"), 3, keep=False)
