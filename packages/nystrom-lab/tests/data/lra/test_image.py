import importlib.util
import lzma
import os
from pathlib import Path

import numpy as np
import pytest

from nystrom_lab.data.lra.image import Image, prepare_image
from nystrom_lab.data.show import show
from nystrom_lab.data.sources.cifar_files import find_cifar, to_gray
from nystrom_lab.data.store.token_files import SPLITS

SPEC = importlib.util.spec_from_file_location("cifar_like", Path(__file__).parents[1] / "cifar_like.py")
cifar_like = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(cifar_like)

BATCHES = cifar_like.make_batches()


def prepare(source, to, **settings):
    with pytest.warns(UserWarning, match=r"holds .* pictures, .*CIFAR-10 has") as caught:
        made = prepare_image(source, to, **({"val": 20, "check_counts": False} | settings))
    assert len(caught) == 2
    return made


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix == ".npy"}


def write(kind, folder, batches=BATCHES):
    binary = folder / "cifar-10-batches-bin"
    if kind == "binary":
        return cifar_like.write_binary(binary, batches)
    if kind == "binary archive":
        return cifar_like.write_archive(folder / "cifar-10-binary.tar.gz", cifar_like.write_binary(binary, batches))
    arrays = cifar_like.write_arrays(folder / "cifar.npz", batches)
    if kind == "compressed arrays":
        (folder / "cifar.npz.xz").write_bytes(lzma.compress(arrays.read_bytes()))
        return folder / "cifar.npz.xz"
    return arrays


KINDS = ("binary", "binary archive", "arrays", "compressed arrays")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image")
    return prepare(write("binary", folder), folder / "data")


@pytest.mark.parametrize("kind", KINDS)
def test_all_forms_give_one_data_set(made, tmp_path, kind):
    assert files(prepare(write(kind, tmp_path), tmp_path / "data")) == files(made)


def test_every_picture_is_in_one_split_with_its_label(made):
    wanted = {name: [] for name in ("training", "test")}
    for name, (data, labels) in BATCHES.items():
        colours = data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        pairs = zip(to_gray(colours).reshape(-1, 1024), labels, strict=True)
        wanted["test" if name == "test_batch" else "training"] += [(pixels.tobytes(), label) for pixels, label in pairs]
    came = {split: [(item["input_ids"].tobytes(), item["labels"]) for item in Image(made, split)] for split in SPLITS}
    assert [len(came[split]) for split in SPLITS] == [130, 20, 30]
    assert came["test"] == wanted["test"]
    assert sorted(came["train"] + came["val"]) == sorted(wanted["training"])
    # The training pictures stay in order, and validation is drawn from the whole file.
    held_out = set(came["val"])
    assert came["train"] == [pair for pair in wanted["training"] if pair not in held_out]
    assert came["val"] != wanted["training"][-20:]


def test_the_seed_decides_the_validation_split(made, tmp_path):
    source = write("binary", tmp_path)
    other = files(prepare(source, tmp_path / "other", seed=1))
    assert other["test_tokens.npy"] == files(made)["test_tokens.npy"]
    assert other["val_tokens.npy"] != files(made)["val_tokens.npy"]


def test_gray_is_cut_off_as_published():
    # 0.2989, 0.587 and 0.114 of 255, times 255.5 / 255, truncated to a whole number.
    colours = [[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255], [0, 0, 0], [1, 1, 1], [100, 150, 200]]
    assert to_gray(np.array(colours, dtype=np.uint8)).tolist() == [76, 149, 29, 255, 0, 1, 141]
    rng = np.random.default_rng(0)
    colours = rng.integers(0, 256, (100_000, 3), dtype=np.uint8)
    exact = (colours.astype(np.float64) @ [0.2989, 0.587, 0.114]) * 255.5 / 255
    # In single precision a value close to a whole number may fall on the other side of it.
    sure = np.abs(exact - np.rint(exact)) > 1e-4
    assert sure.mean() > 0.999
    assert (to_gray(colours)[sure] == np.floor(exact[sure])).all()


def test_gray_arrays_are_taken_as_they_are(made, tmp_path):
    gray = {}
    for split, names in (("train", cifar_like.BATCHES[:-1]), ("test", cifar_like.BATCHES[-1:])):
        whole = np.concatenate([BATCHES[name][0] for name in names])
        gray[f"x_{split}"] = to_gray(whole.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    source = cifar_like.write_arrays(tmp_path / "gray.npz", BATCHES, **gray, lossy_train=np.zeros(3))
    assert files(prepare(source, tmp_path / "data")) == files(made)


def test_the_arrays_inside_a_folder_are_found(made, tmp_path):
    arrays = cifar_like.write_arrays(tmp_path / "cifar.npz", BATCHES)
    (tmp_path / "seeds").mkdir()
    (tmp_path / "seeds" / "README.md").touch()
    (tmp_path / "seeds" / "cifar10_gray.npz.xz").write_bytes(lzma.compress(arrays.read_bytes()))
    assert files(prepare(tmp_path / "seeds", tmp_path / "data")) == files(made)
    arrays.rename(tmp_path / "seeds" / "cifar.npz")
    with pytest.raises(ValueError, match=r"seeds holds .*cifar.npz and .*cifar10_gray.npz.xz: name one of the files"):
        find_cifar(tmp_path / "seeds")


def test_another_source_for_a_folder_is_named(tmp_path):
    source = write("binary", tmp_path)
    to = prepare(source, tmp_path / "data")
    before = files(to)
    data, labels = BATCHES["test_batch"]
    (source / "test_batch.bin").write_bytes(cifar_like.binary(data[::-1], labels[::-1]))
    with pytest.raises(ValueError, match=r"other settings .*sha256="):
        prepare_image(source, to, val=20, check_counts=False)
    assert files(to) == before


def test_wrong_counts_raise_unless_allowed(tmp_path):
    source = write("binary", tmp_path)
    message = r"holds 150 training pictures, \[15, .*\] of the ten classes; CIFAR-10 has 50000.*--no-check-counts"
    with pytest.raises(ValueError, match=message):
        prepare_image(source, tmp_path / "data", val=20)
    with (
        pytest.warns(UserWarning, match="CIFAR-10 has"),
        pytest.raises(ValueError, match=r"--val is 150 but .* holds 150 training pictures: use fewer"),
    ):
        prepare_image(source, tmp_path / "data", val=150, check_counts=False)
    assert os.listdir(tmp_path) == ["cifar-10-batches-bin"]


@pytest.mark.refuses
@pytest.mark.parametrize(("change", "message"), [({"val": -1}, "--val is -1"), ({"seed": -1}, "--seed is -1")])
def test_impossible_settings_raise(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        prepare_image(tmp_path, tmp_path / "data", **change)


def test_a_missing_source_says_where_it_is_published_and_what_name_it_has(tmp_path):
    published = r"https://www.cs.toronto.edu/~kriz/cifar.html as cifar-10-binary.tar.gz \(folder cifar-10-batches-bin\)"
    with pytest.raises(ValueError, match=f"none does not exist: .*{published}"):
        find_cifar(tmp_path / "none")
    (tmp_path / "letter.txt").touch()
    for source in (tmp_path, tmp_path / "letter.txt"):
        with pytest.raises(ValueError, match=f"holds no pictures of CIFAR-10 that can be read: .*{published}"):
            find_cifar(source)
    source = write("binary", tmp_path)
    (source / "data_batch_3.bin").unlink()
    (source / "test_batch.bin").unlink()
    for place in (source, tmp_path):
        with pytest.raises(ValueError, match=f"lacks data_batch_3.bin, test_batch.bin. .*{published}"):
            find_cifar(place)


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_cut_short_is_named_and_an_earlier_output_stays(made, tmp_path, kind):
    source = write(kind, tmp_path)
    before = files(made)
    path = source / "data_batch_2.bin" if kind == "binary" else source
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=f"{path.name}.*(cut short|cannot be read|no archive of plain arrays)"):
        prepare_image(source, tmp_path / "data", check_counts=False)
    assert not (tmp_path / "data").exists()
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".partial")]
    assert files(made) == before


@pytest.mark.parametrize("kind", ["binary", "binary archive"])
def test_a_batch_that_occurs_twice_is_named(tmp_path, kind):
    source = write(kind, tmp_path, BATCHES | {"test_batch": BATCHES["data_batch_4"]})
    with pytest.raises(ValueError, match=r"the same pictures as data_batch_4.bin and test_batch.bin, so they would"):
        prepare_image(source, tmp_path / "data", check_counts=False)


def test_archives_that_lack_a_batch_and_labels_out_of_range_are_named(tmp_path):
    source = write("binary archive", tmp_path, {name: BATCHES[name] for name in BATCHES if name != "data_batch_5"})
    with pytest.raises(ValueError, match=r"cifar-10-binary.tar.gz lacks data_batch_5.bin\."):
        prepare_image(source, tmp_path / "data", check_counts=False)
    (tmp_path / "wrong").mkdir()
    data, labels = BATCHES["data_batch_1"]
    wrong = BATCHES | {"data_batch_1": (data, [*labels[:4], 10, *labels[5:]])}
    with pytest.raises(ValueError, match=r"data_batch_1.bin, picture 4, has the label 10; CIFAR-10 has 0 to 9"):
        prepare_image(write("binary", tmp_path / "wrong", wrong), tmp_path / "data", check_counts=False)


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-py/data_batch_1", "cifar-10-python.tar.gz", "renamed.tar.gz"])
def test_pickles_are_refused_with_the_release_to_fetch(tmp_path, inside):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(b"cos\nsystem\n.")
    if inside.endswith(".tar.gz"):
        cifar_like.write_archive(tmp_path / inside, folder)
    with pytest.raises(ValueError, match=r"holds pickles, .* never loaded.* as cifar-10-binary.tar.gz") as error:
        prepare_image(tmp_path / inside, tmp_path / "data", check_counts=False)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "data").exists()


BLACK = np.zeros((30, 32, 32), np.uint8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x_test": None}, "lacks x_test: it must hold x_train, y_train, x_test, y_test"),
        ({"x_test": np.zeros((30, 28, 28), np.uint8)}, r"x_test as uint8 of shape \(30, 28, 28\)"),
        ({"x_test": np.zeros((30, 32, 32))}, "x_test as float64"),
        ({"y_test": np.zeros(29, int)}, r"x_test as uint8 of shape \(30, 32, 32, 3\) .*expected uint8 of shape \(29"),
        ({"y_test": np.full(30, 11)}, "y_test, picture 0, has the label 11"),
        ({"y_test": np.array([print] * 30, dtype=object)}, "is not an archive of plain arrays .*never loaded"),
        ({"x_train": BLACK, "x_test": BLACK, "y_train": np.arange(30) % 10}, "the same pictures in x_train and x_test"),
    ],
)
def test_wrong_arrays_are_named(tmp_path, changed, message):
    source = cifar_like.write_arrays(tmp_path / "wrong.npz", BATCHES, **changed)
    with pytest.raises(ValueError, match=f"wrong.npz.*{message}"):
        prepare_image(source, tmp_path / "data", check_counts=False)


def test_pictures_are_shown_as_a_grid(made, tmp_path):
    from PIL import Image as Png

    to = tmp_path / "deep" / "grid.png"
    assert list(show("image", made, count=5, to=to)) == [str(to)]
    with Png.open(to) as grid:
        assert grid.mode == "L"
        pixels = np.array(grid)
    # Three columns and two rows of 192 pixels, a gap of 12 around each and a caption of 18 above.
    assert pixels.shape == (12 + 2 * (192 + 12 + 18), 12 + 3 * (192 + 12))
    data = Image(made, "train")
    for i, number in enumerate(np.linspace(0, 129, 5).round().astype(int)):
        left, top = 12 + i % 3 * 204, 12 + i // 3 * 222 + 18
        assert np.array_equal(pixels[top : top + 192 : 6, left : left + 192 : 6], data.picture(number))
        # There is writing above.
        assert pixels[top - 18 : top, left : left + 192].min() < 100
    assert os.listdir(tmp_path / "deep") == ["grid.png"]


def test_a_grid_needs_a_png_to_go_to(made, tmp_path):
    with pytest.raises(ValueError, match="--to is missing: image is shown as a grid"):
        list(show("image", made))
    with pytest.raises(ValueError, match=r"must end in \.png"):
        list(show("image", made, to=tmp_path / "grid.jpg"))
