"""The oracle is Python's own unpickler, which may run here: the test wrote the file."""

import importlib.util
import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest

from nystrom_lab.data.sources.cifar_pickle import read_pickled_batch

SPEC = importlib.util.spec_from_file_location("cifar_like", Path(__file__).parents[1] / "cifar_like.py")
cifar_like = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(cifar_like)

DATA, LABELS = cifar_like.make_batches(per_class=30)["data_batch_1"]


@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_a_published_file_is_read_as_python_reads_it(module):
    content = cifar_like.pickled(DATA, LABELS, module=module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = pickle.loads(content, encoding="bytes")
    came = read_pickled_batch(content, "data_batch_1")
    assert came.keys() == wanted.keys() == {b"batch_label", b"labels", b"data", b"filenames"}
    assert np.array_equal(came.pop(b"data"), wanted.pop(b"data"))
    assert came == wanted
    assert len(came[b"filenames"]) == 300


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_runs_and_the_step_is_named(tmp_path, protocol):
    content = pickle.dumps({"data": Touch(tmp_path / "ran")}, protocol=protocol)
    with pytest.raises(ValueError, match=r"evil is not one of .*(the step|asks for).*nothing in it was run"):
        read_pickled_batch(content, "evil")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x02cos\nsystem\nU\x04true\x85R.", "asks for os system"),
        (b"\x80\x02cnumpy\nndarray\nK\x00\x85R.", "not callable"),
        (b"\x80\x02cnumpy\ndtype\nU\x01O\x85R.", "not of uint8"),
        (
            b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\ndtype\nK\x00\x85U\x01b\x87R.",
            "something else",
        ),
        (b"\x80\x02cnumpy.core.multiarray\nscalar\n.", "asks for numpy.core.multiarray scalar"),
        (b"\x80\x02}}b.", "no attribute"),
        (b"\x80\x02}K\x01a.", "no attribute"),
        (b"\x80\x02]K\x01K\x02s.", "cut short"),
        (b"\x80\x02}]K\x01s.", "unhashable"),
        (b"\x80\x02e.", "cut short"),
        (b"\x80\x02h\x07.", "cut short"),
        (b"\x80\x02}", "cut short"),
        (b"", "cut short"),
        (b"just text\n", "cut short"),
        # A place in memory that would need gigabytes before the end of the file is reached.
        (b"\x80\x02}r\xff\xff\xff\x7f.", "remembers something in place 2147483647"),
        # Python follows a nested tuple down without a limit when it is the key of a dict.
        (b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.", "more than 100 tuples"),
        # State for the stand-ins of numpy's names: their attributes, or those of this module's classes.
        (b"\x80\x02cnumpy\ndtype\n}U\x04evilK\x01sb.", "__setstate__"),
        (b"\x80\x02cnumpy.core.multiarray\n_reconstruct\nN}U\x08__init__K\x01s\x86b.", "__setstate__"),
        (b"\x80\x02cnumpy\nndarray\nN}U\x04evilK\x01s\x86b.", "attribute name"),
        # Steps that look up or call in other ways.
        (b"(S'true'\nios\nsystem\n.", "the step STRING"),
        (b"\x80\x02(cnumpy\ndtype\nU\x02u1o.", "the step OBJ"),
        (b"\x80\x02cnumpy\ndtype\n)\x81.", "the step NEWOBJ"),
        (b"\x80\x02\x82\x01.", "the step EXT1"),
        (b"Pid\n.", "the step PERSID"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "the step SHORT_BINUNICODE"),
        (b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncbuiltins\neval\n\x85R.", "asks for builtins eval"),
        (b"\x80\x02cnumpy\nndarray.__class__\n.", "asks for numpy ndarray.__class__"),
        (b"\x80\x02].", "holds list, not the dict of a published file"),
    ],
)
def test_steps_that_the_published_files_do_not_have_raise(content, message):
    with pytest.raises(ValueError, match=message):
        read_pickled_batch(content, "file")


def test_a_file_cut_short_anywhere_raises():
    content = cifar_like.pickled(DATA[:3], LABELS[:3])
    for end in range(0, len(content), 61):
        with pytest.raises(ValueError, match="or is cut short"):
            read_pickled_batch(content[:end], "file")


def test_arrays_of_other_kinds_raise():
    content = cifar_like.pickled(DATA[:2], LABELS[:2], dtype=b"O8")
    with pytest.raises(ValueError, match="not of uint8"):
        read_pickled_batch(content, "file")
    with pytest.raises(ValueError, match="cannot reshape"):
        read_pickled_batch(cifar_like.pickled(DATA[:2], LABELS).replace(b"K\x02M\x00\x0c", b"K\x03M\x00\x0c"), "file")
