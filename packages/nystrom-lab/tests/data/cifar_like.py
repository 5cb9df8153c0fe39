"""Small files in the forms of CIFAR-10 that are read."""

import io
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


def binary(data, labels):
    """A batch as cifar-10-batches-bin holds it."""
    return np.column_stack([np.array(labels, dtype=np.uint8), data]).tobytes()


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
