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

MEGABYTES = 3
ENOUGH = 0.004


@pytest.mark.parametrize(("ending", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)])
def test_a_stream_stops_at_the_limit(tmp_path, ending, pack):
    path = tmp_path / f"a{ending}"
    path.write_bytes(pack(bytes(MEGABYTES * 10**6)))
    with (
        open_unpacked(path, max_unpacked=0.001) as file,
        # `nystrom train` and `finetune` read such files, too, and have no such option.
        pytest.raises(ValueError, match=r"more than 0.001 GB: .*unpack it first, or allow more with --max-unpacked"),
    ):
        file.read()
    with open_unpacked(path, max_unpacked=ENOUGH) as file:
        assert len(file.read()) == MEGABYTES * 10**6


def test_without_a_limit_of_ones_own_it_is_a_multiple_of_the_size(tmp_path, monkeypatch):
    monkeypatch.setattr(unpacking, "AT_LEAST", 1000)
    path = tmp_path / "a.gz"
    # Random bytes do not compress; zeros do, a thousand times.
    for content, fits in ((np.random.default_rng(0).bytes(100_000), True), (bytes(100_000), False)):
        path.write_bytes(gzip.compress(content))
        with open_unpacked(path) as file:
            if fits:
                assert file.read() == content
            else:
                with pytest.raises(ValueError, match="unpacks to more than"):
                    file.read()


def test_a_plain_file_has_no_limit(tmp_path):
    (tmp_path / "a.csv").write_bytes(bytes(5000))
    with open_unpacked(tmp_path / "a.csv", max_unpacked=1e-6) as file:
        assert len(file.read()) == 5000


def test_texts_archives_and_arrays_obey_the_limit(tmp_path):
    rows = tmp_path / "a.csv.gz"
    rows.write_bytes(gzip.compress(b"text,label\n" + b"x" * MEGABYTES * 10**6 + b",1\n"))
    with tarfile.open(tmp_path / "aclImdb_v1.tar.gz", "w:gz") as tar:
        info = tarfile.TarInfo("aclImdb/train/pos/0_1.txt")
        info.size = MEGABYTES * 10**6
        tar.addfile(info, io.BytesIO(bytes(info.size)))
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes((tmp_path / "aclImdb_v1.tar.gz").read_bytes())
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as arrays:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            content = io.BytesIO()
            np.save(content, np.zeros(10**6, dtype=np.uint8))
            arrays.writestr(f"{name}.npy", content.getvalue())
    (tmp_path / "a.npz.xz").write_bytes(lzma.compress((tmp_path / "a.npz").read_bytes()))
    for prepare, name in (
        (prepare_text, "a.csv.gz"),
        (prepare_text, "aclImdb_v1.tar.gz"),
        (prepare_image, "cifar-10-binary.tar.gz"),
        (prepare_image, "a.npz"),
        (prepare_image, "a.npz.xz"),
    ):
        with pytest.raises(ValueError, match=f"{name} has .* unpacks to more than 0.001 GB: .*--max-unpacked"):
            prepare(tmp_path / name, tmp_path / "to", max_unpacked=0.001)
        assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_an_impossible_limit_is_an_error(tmp_path, limit):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"a"))
    with (
        pytest.raises(ValueError, match=r"--max-unpacked is .*; expected a positive number"),
        open_unpacked(tmp_path / "a.gz", max_unpacked=limit),
    ):
        pass


@pytest.mark.parametrize(("ending", "codec"), [(".zst", "zstd"), (".lz4", "lz4")])
def test_what_pyarrow_unpacks_is_read_to_its_end_or_refused(tmp_path, ending, codec):
    content, sink = b"line\n" * 100_000, pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, codec) as stream:
        stream.write(content)
    packed, path = sink.getvalue().to_pybytes(), tmp_path / f"a.txt{ending}"
    # Two frames are one stream.
    path.write_bytes(packed * 2)
    with open_unpacked(path) as file:
        assert file.read() == content * 2
    for broken in (packed[:-1], packed[: len(packed) // 2], b"nothing of that kind"):
        path.write_bytes(broken)
        with open_unpacked(path) as file, pytest.raises(BROKEN):
            file.read()
    with pyarrow.CompressedOutputStream(str(path), codec) as stream:
        stream.write(bytes(MEGABYTES * 10**6))
    with open_unpacked(path, max_unpacked=0.001) as file, pytest.raises(ValueError, match=r"more than 0.001 GB"):
        file.read()
