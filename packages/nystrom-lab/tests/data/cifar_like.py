"""Small files in the three published forms of CIFAR-10."""

import io
import struct
import tarfile

import numpy as np

BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def make_batches(per_class=3, seed=0):
    """Six batches of data (rows of 3,072 bytes) and labels."""
    rng = np.random.default_rng(seed)
    batches = {}
    for name in BATCHES:
        labels = rng.permutation(np.repeat(np.arange(10), per_class))
        batches[name] = rng.integers(0, 256, (labels.size, 3072), dtype=np.uint8), labels.tolist()
    return batches


def short(text):
    return b"U" + bytes([len(text)]) + text


def number(value):
    return b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)


def pickled(data, labels, *, module=b"numpy.core.multiarray", dtype=b"u1"):
    """A batch pickled as Python 2 pickled the published ones, opcode by opcode."""
    content = data.tobytes()
    array = b"c" + module + b"\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85q\x09" + short(b"b") + b"\x87Rq\x0a"
    kind = b"cnumpy\ndtype\nq\x0b" + short(dtype) + b"K\x00K\x01\x87Rq\x0c(K\x03" + short(b"|")
    kind += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"".join(map(number, data.shape)) + b"\x86"
    state = b"(K\x01" + shape + kind + b"\x89T" + struct.pack("<i", len(content)) + content + b"tb"
    names = b"".join(short(b"picture_%d.png" % i) + b"r" + struct.pack("<I", 300 + i) for i in range(len(labels)))
    parts = [
        b"\x80\x02}q\x01(",
        short(b"batch_label") + b"q\x02" + short(b"training batch 1 of 5") + b"q\x03",
        short(b"labels") + b"q\x04]q\x05(" + b"".join(map(number, labels)) + b"e",
        short(b"data") + b"q\x06" + array + state,
        short(b"filenames") + b"]q\x0d(" + names + b"e",
        b"u.",
    ]
    return b"".join(parts)


def binary(data, labels):
    """A batch as cifar-10-batches-bin holds it."""
    return np.column_stack([np.array(labels, dtype=np.uint8), data]).tobytes()


def write_python(folder, batches):
    folder.mkdir(parents=True)
    for name, (data, labels) in batches.items():
        (folder / name).write_bytes(pickled(data, labels))
    (folder / "batches.meta").write_bytes(b"\x80\x02}.")
    return folder


def write_binary(folder, batches):
    folder.mkdir(parents=True)
    for name, (data, labels) in batches.items():
        (folder / f"{name}.bin").write_bytes(binary(data, labels))
    return folder


def write_archive(path, folder):
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, arcname=folder.name)
    return path


def write_arrays(path, batches, **changed):
    """Colour pictures as arrays."""
    train = [batches[name] for name in BATCHES[:-1]]
    pixels = {"train": np.concatenate([data for data, _ in train]), "test": batches["test_batch"][0]}
    arrays = {f"x_{split}": data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) for split, data in pixels.items()}
    arrays |= {"y_train": np.concatenate([labels for _, labels in train]), "y_test": np.array(batches["test_batch"][1])}
    content = io.BytesIO()
    np.savez(content, **{name: array for name, array in (arrays | changed).items() if array is not None})
    path.write_bytes(content.getvalue())
    return path
