"""Small files that unpack to large ones."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile

import numpy as np
import pyarrow
import pytest

from nystrom_lab.data.lra.image import prepare_image
from nystrom_lab.data.lra.texts.reviews import prepare_text
from nystrom_lab.data.sources import unpacking
from nystrom_lab.data.sources.unpacking import BROKEN, open_unpacked

ZEROS = bytes(3 * 10**6)


@pytest.fixture(autouse=True)
def a_limit_of_a_megabyte(monkeypatch):
    monkeypatch.setattr(unpacking, "AT_LEAST", 10**6)


def by_pyarrow(codec):
    def pack(content):
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, codec) as stream:
            stream.write(content)
        return sink.getvalue().to_pybytes()

    return pack


PACKERS = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
PACKERS |= {".zst": by_pyarrow("zstd"), ".lz4": by_pyarrow("lz4")}


@pytest.mark.parametrize("ending", PACKERS)
def test_a_stream_is_read_to_its_end_or_refused(tmp_path, ending):
    pack, path = PACKERS[ending], tmp_path / f"a{ending}"
    content = b"line\n" * 100_000
    packed = pack(content)
    # Two of them are one stream.
    path.write_bytes(packed * 2)
    with open_unpacked(path) as file:
        assert file.read() == content * 2
    for broken in (packed[:-1], packed[: len(packed) // 2], b"nothing of that kind"):
        path.write_bytes(broken)
        with open_unpacked(path) as file, pytest.raises(BROKEN):
            file.read()
    path.write_bytes(pack(ZEROS))
    with open_unpacked(path) as file, pytest.raises(ValueError, match=r"more than 0.001 GB: .*unpack it first\.$"):
        file.read()


def test_the_limit_is_a_multiple_of_the_size_and_a_plain_file_has_none(tmp_path):
    # Random bytes do not compress, so they are within the limit.
    content = np.random.default_rng(0).bytes(2 * 10**6)
    for name, stored in (("a.gz", gzip.compress(content)), ("a.csv", content)):
        (tmp_path / name).write_bytes(stored)
        with open_unpacked(tmp_path / name) as file:
            assert file.read() == content


def test_texts_archives_and_arrays_obey_the_limit(tmp_path):
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"text,label\n" + ZEROS + b",1\n"))
    with tarfile.open(tmp_path / "aclImdb_v1.tar.gz", "w:gz") as tar:
        info = tarfile.TarInfo("aclImdb/train/pos/0_1.txt")
        info.size = len(ZEROS)
        tar.addfile(info, io.BytesIO(ZEROS))
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes((tmp_path / "aclImdb_v1.tar.gz").read_bytes())
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as arrays:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            content = io.BytesIO()
            np.save(content, np.zeros(10**6, dtype=np.uint8))
            arrays.writestr(f"{name}.npy", content.getvalue())
    (tmp_path / "a.npz.xz").write_bytes(lzma.compress((tmp_path / "a.npz").read_bytes()))
    names = {prepare_text: ("a.csv.gz", "aclImdb_v1.tar.gz")}
    names |= {prepare_image: ("cifar-10-binary.tar.gz", "a.npz", "a.npz.xz")}
    for prepare, name in [(each, name) for each, found in names.items() for name in found]:
        with pytest.raises(ValueError, match=f"{name} has .* unpacks to more than 0.001 GB: .*unpack it first"):
            prepare(tmp_path / name, tmp_path / "to")
        assert not (tmp_path / "to").exists()
