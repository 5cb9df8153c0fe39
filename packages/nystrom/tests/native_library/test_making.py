"""The loops are made once, or not at all, and `status` says which."""

import errno
import os
import platform
import stat
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from nystrom import native, native_library
from nystrom.attention.fused import fused_softmax, softmax_rows
from nystrom.linalg.pinv import iterate

BROKEN = '#!/bin/sh\ncase "$*" in *--version) exit;; esac\necho compiled >> {folder}/log\n{first}\nexit 1\n'


@pytest.mark.parametrize("way", ["first call", "forked child", "-W error"])
@pytest.mark.parametrize("cause", ["an error", "another encoding", "no word", "no source", "a full disk"])
def test_where_nothing_can_be_made_torch_computes_and_one_warning_says_why(cause, way, machine, monkeypatch, no_space):
    says = {"an error": "echo no such option >&2", "another encoding": r"printf 'no such option \377\n' >&2"}
    if cause in says or cause == "no word":
        machine.write_compiler(says.get(cause, ""), BROKEN)
    if cause == "no source":
        monkeypatch.setattr(native_library, "files", lambda _: machine.folder / "log" / "nowhere")
    why = {"no word": "exit status 1", "no source": "No such file", "a full disk": "No space left"}

    def check():
        if way == "-W error":
            with pytest.raises(RuntimeWarning, match="could not make the loops"):
                machine.check_numbers()
        else:
            (problem,) = machine.problems()
            assert why.get(cause, "no such option") in problem
            assert "NYSTROM_NATIVE=0" in problem
        machine.check_numbers()
        assert not native.status().runs
        # The other dtype has the same problem, which is known.
        assert not native.status(torch.float64).runs
        assert native.status(torch.float64).reason

    machine.run(way, check)
    assert machine.times_compiled() == (0 if cause == "no source" else 2)


def test_without_a_compiler_torch_computes_in_silence(machine, monkeypatch):
    for compiler in ("", str(machine.folder / "none")):
        monkeypatch.setenv("CXX", compiler)
        machine.forget()
        machine.check_numbers()
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
    (problem,) = machine.problems()
    assert "home directory" in problem
    assert native.status() == (True, None, problem)


def test_the_name_tells_source_compiler_machine_and_library_of_c(machine, monkeypatch, tmp_path):
    def file():
        machine.forget()
        return native.status().file

    made = [file(), file()]
    machine.write_compiler(script=machine.script.replace("version 1", "version 2"))
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

    for child in [machine.fork(check) for _ in range(2)]:
        machine.wait(child)
    assert machine.times_compiled() == 1
    machine.check_numbers()
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
        child = machine.fork(machine.check_numbers)
        (machine.folder / "go").touch()
        assert made.result().runs
    machine.wait(child)
    assert machine.times_compiled() == 1
    # A child of a process that has the loops
    machine.wait(machine.fork(machine.check_numbers))


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
