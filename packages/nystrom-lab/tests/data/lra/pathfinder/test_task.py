import os
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nystrom_lab.data.lra.pathfinder import task as lra_pathfinder
from nystrom_lab.data.lra.pathfinder.curves import draw_pictures
from nystrom_lab.data.lra.pathfinder.dashes import GEOMETRIES
from nystrom_lab.data.lra.pathfinder.task import Pathfinder, prepare_pathfinder

SMALL = {"train": 160, "val": 40, "test": 50}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(lra_pathfinder, "chunk_size", lambda geometry: 64)


def prepare(to, **settings):
    return prepare_pathfinder(to, **({"workers": 1} | SMALL | settings))


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lra_pathfinder, "chunk_size", lambda geometry: 64)
        return prepare(tmp_path_factory.mktemp("pathfinder") / "data")


@pytest.mark.long
def test_samples_are_the_pictures_in_their_order(made):
    seeds = [np.random.SeedSequence(0, spawn_key=(number,)) for number in range(4)]
    whole = [draw_pictures(np.random.Generator(np.random.PCG64(seed)), 64, GEOMETRIES[32]) for seed in seeds]
    pictures, labels = (np.concatenate([getattr(part, name) for part in whole]) for name in ("pictures", "labels"))
    start = 0
    for split in ("test", "val", "train"):
        data = Pathfinder(made, split)
        there = slice(start, start + SMALL[split])
        assert len(data) == SMALL[split]
        assert np.array_equal([item["input_ids"] for item in data], pictures[there].reshape(-1, 1024))
        assert [item["labels"] for item in data] == data.labels.tolist() == labels[there].tolist()
        start = there.stop


@pytest.mark.long
def test_the_seed_determines_the_pictures_for_any_number_of_processes(made, tmp_path, monkeypatch):
    # Another process would not use the smaller chunks.
    monkeypatch.undo()
    settings = {"size": 128, "difficulty": "easy", "train": 100, "val": 0, "test": 0}
    one = files(prepare(tmp_path / "one", workers=1, **settings))
    assert one == files(prepare(tmp_path / "two", workers=2, **settings))
    other = files(prepare(tmp_path / "other", seed=1, workers=1, **settings))
    assert other["train_tokens.npy"][-(128**2) :] not in one["train_tokens.npy"]


@pytest.mark.long
def test_more_training_pictures_leave_test_and_validation_as_they_were(made, tmp_path):
    more = files(prepare(tmp_path / "more", train=200))
    for name, content in files(made).items():
        if name.startswith(("val", "test")):
            assert more[name] == content


@pytest.mark.parametrize("size", [64, 256])
def test_pictures_of_other_sizes(tmp_path, size):
    to = prepare(tmp_path / "data", size=size, difficulty="easy", train=8, val=2, test=2)
    data = Pathfinder(to, "train")
    assert data.lengths.tolist() == [size * size] * 8
    assert data.picture(0).shape == (size, size)


@pytest.mark.long
def test_an_easier_data_set_has_shorter_snakes(made, tmp_path):
    easy = Pathfinder(prepare(tmp_path / "data", difficulty="easy"), "train")
    hard = Pathfinder(made, "train")
    ink = [np.mean([(item["input_ids"] > 60).sum() for item in data]) for data in (easy, hard)]
    # Two snakes of 6 dashes and ten of 2 at most, against two of 14 and five of 4.
    assert ink[0] < 0.9 * ink[1]


@pytest.mark.long
def test_a_contour_of_ones_own_has_so_many_dashes(made, tmp_path):
    as_hard = files(prepare(tmp_path / "hard", contour=14))
    assert {name: as_hard[name] for name in as_hard if name.endswith(".npy")} == {
        name: content for name, content in files(made).items() if name.endswith(".npy")
    }
    short = Pathfinder(prepare(tmp_path / "short", contour=3), "train")
    ink = [np.mean([(item["input_ids"] > 60).sum() for item in data]) for data in (short, Pathfinder(made, "train"))]
    # Two snakes of 3 dashes and twenty of 1 at most, against two of 14 and five of 4.
    assert ink[0] < 0.7 * ink[1]
    with pytest.raises(ValueError, match="contour=3 there and 4 asked for"):
        prepare(tmp_path / "short", contour=4)
    with pytest.raises(ValueError, match="contour is 3 and difficulty 'easy', which has its own: give one of the two"):
        prepare(tmp_path / "both", contour=3, difficulty="easy")


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 48}, "--size is 48; expected one of 32, 64, 128, 256"),
        ({"difficulty": "harder"}, "--difficulty is 'harder'; expected one of 'easy', 'intermediate', 'hard'"),
        ({"contour": 2}, "contour must be 3 to 14 dashes, got 2: leave it out for 'hard'"),
        ({"contour": 4, "source": Path("x")}, "contour is 4, but published pictures are easy, intermediate or hard"),
        ({"val": -1}, "--val is -1; expected a whole number of at least 0"),
        ({"train": 0, "val": 0, "test": 0}, "all 0: ask for at least one"),
        ({"seed": -3}, "--seed is -3; expected"),
        ({"workers": 0}, "--workers is 0; expected a whole number of at least 1"),
        ({"source": Path("x")}, "test, val, train cannot be chosen for published pictures"),
    ],
)
def test_impossible_settings_raise_before_the_work(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        # A billion pictures, which would take days.
        prepare(tmp_path / "data", **{"train": 10**9} | change)
    assert not list(tmp_path.iterdir())


def test_a_process_that_is_ended_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(lra_pathfinder, "draw_chunk", end_yourself)
    with pytest.raises(OSError, match=r"a process that drew pictures was ended by the system.*try workers=1, got 2"):
        prepare(tmp_path / "data", workers=2)
    assert not list(tmp_path.iterdir())


def end_yourself(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def row(number, label):
    return f"imgs/{number // 10} sample_{number % 10}.png {number % 10} {label} 1.8 14 4 2 0.5 1 1"


@pytest.fixture
def release(tmp_path):
    """Thirty pictures in three folders of ten; picture i is uniformly gray i, and odd ones are of class 1."""
    folder = tmp_path / "pathfinder32" / "curv_contour_length_14"
    (folder / "metadata").mkdir(parents=True)
    for batch in range(3):
        (folder / "imgs" / str(batch)).mkdir(parents=True)
        numbers = range(10 * batch, 10 * batch + 10)
        for number in numbers:
            Image.new("L", (32, 32), number).save(folder / "imgs" / str(batch) / f"sample_{number % 10}.png")
        (folder / "metadata" / f"{batch}.npy").write_text("".join(row(number, number % 2) + "\n" for number in numbers))
    return folder.parent


def read(source, to, **settings):
    return prepare_pathfinder(to, source=source, **settings)


def check(to):
    seen = []
    for split, count in (("train", 24), ("val", 3), ("test", 3)):
        data = Pathfinder(to, split)
        assert len(data) == count
        for item in data:
            (gray,) = np.unique(item["input_ids"])
            assert gray % 2 == item["labels"]
            seen.append(gray)
    assert sorted(seen) == list(range(30))
    return seen


def test_published_pictures_are_read_and_split(release, tmp_path):
    seen = check(read(release, tmp_path / "data"))
    assert seen != sorted(seen)
    assert seen == check(read(release / "curv_contour_length_14", tmp_path / "again"))
    assert seen == check(read(tmp_path, tmp_path / "above"))
    assert seen != check(read(release, tmp_path / "other", seed=1))
    # The layout of the unpacked archive.
    (tmp_path / "unpacked" / "lra_release" / "lra_release").mkdir(parents=True)
    release.rename(tmp_path / "unpacked" / "lra_release" / "lra_release" / "pathfinder32")
    assert seen == check(read(tmp_path / "unpacked" / "lra_release", tmp_path / "inside"))


@pytest.mark.parametrize("kind", ["U", "S"])
def test_metadata_may_be_an_array_of_strings(release, tmp_path, kind):
    for file in (release / "curv_contour_length_14" / "metadata").iterdir():
        rows = [line.split() for line in file.read_text().splitlines()]
        with file.open("wb") as opened:
            np.save(opened, np.array(rows, dtype=kind))
    check(read(release, tmp_path / "data"))


def test_pickled_metadata_are_never_loaded(release, tmp_path):
    file = release / "curv_contour_length_14" / "metadata" / "1.npy"
    touched = tmp_path / "touched"

    class Touch:
        def __reduce__(self):
            return Path.touch, (touched,)

    with file.open("wb") as opened:
        np.save(opened, np.array([[Touch()]], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"1.npy cannot be read .*never loaded, since they can run code.*as text"):
        read(release, tmp_path / "data")
    assert not touched.exists()


def test_a_missing_source_says_where_it_is_published(tmp_path):
    message = r"holds no folder curv_contour_length_14 with imgs and metadata.*lra_release.gz.*pathfinder32"
    for source in (tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match=message):
            read(source, tmp_path / "data")
    with pytest.raises(ValueError, match=r"no folder curv_baseline .*pathfinder64"):
        read(tmp_path, tmp_path / "data", size=64, difficulty="easy")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("imgs/1 sample_0.png 0\n", r"1.npy, row 1, is 'imgs/1 sample_0.png 0': it must have a folder"),
        (row(10, 0) + "\n" + row(11, 2) + "\n", "1.npy, row 2, is .*a label, 0 or 1"),
        (row(10, 0) + "\n" + row(11, 1).replace("imgs", "/etc"), "row 2, names /etc/1/sample_1.png: pictures are in"),
        (row(10, 0) + "\n" + row(11, 1).replace("imgs/", "imgs/../"), "row 2, names imgs/../1/sample_1.png"),
        (row(10, 0) + "\n\n", "1.npy, row 2, is ''"),
        ("\n".join(row(number, 0) for number in (10, 11, 10)), "1.npy, row 3 names .*, as .*1.npy, row 1 does"),
        ("\n".join(row(number, 0) for number in range(10, 25)), "names imgs/2/sample_0.png, as"),
        (
            "\n".join(row(number, 0) for number in range(10, 19)),
            "30 pictures but its metadata have 29 rows; none names",
        ),
        (row(40, 0), r"names imgs/4/sample_0.png, which is not in .* \(1 of 21 pictures are missing\)"),
        (b"\xff\xfe", "1.npy is neither text nor a numpy array"),
        (b"\x93NUMPY\x01\x00", "1.npy cannot be read"),
    ],
)
def test_broken_metadata_are_named_with_their_row_and_leave_nothing(release, tmp_path, content, message):
    file = release / "curv_contour_length_14" / "metadata" / "1.npy"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read(release, tmp_path / "data")
    assert os.listdir(tmp_path) == ["pathfinder32"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda png: png[:-20], "is not a complete PNG"),
        (lambda png: b"", "is not a complete PNG"),
        (lambda png: png[:-16] + bytes([png[-16] ^ 255]) + png[-15:], "is not a complete PNG"),
        (("L", (64, 64)), "is 64 x 64 of mode L; expected 32 x 32 gray pixels .*--size 64"),
        (("RGB", (32, 32)), "is 32 x 32 of mode RGB; expected 32 x 32 gray"),
    ],
)
def test_a_broken_picture_is_named_and_an_earlier_output_stays(release, tmp_path, spoil, message):
    to = read(release, tmp_path / "data")
    before = files(to)
    path = release / "curv_contour_length_14" / "imgs" / "2" / "sample_4.png"
    if callable(spoil):
        path.write_bytes(spoil(path.read_bytes()))
    else:
        Image.new(*spoil).save(path)
    with pytest.raises(ValueError, match=f"2/sample_4.png {message}"):
        read(release, tmp_path / "other")
    assert files(to) == before
    assert sorted(os.listdir(tmp_path)) == ["data", "pathfinder32"]


def test_the_picture_that_was_published_empty_is_left_out(tmp_path, capsys):
    folder = tmp_path / "curv_baseline"
    (folder / "imgs" / "0").mkdir(parents=True)
    (folder / "metadata").mkdir()
    (folder / "metadata" / "0.npy").write_text("".join(f"imgs/0 sample_{i}.png {i} 0\n" for i in (171, 172, 173)))
    for i in (171, 173):
        Image.new("L", (32, 32)).save(folder / "imgs" / "0" / f"sample_{i}.png")
    (folder / "imgs" / "0" / "sample_172.png").touch()
    assert len(Pathfinder(read(tmp_path, tmp_path / "data", difficulty="easy"), "train")) == 2
    assert "sample_172.png was published empty; it is left out" in capsys.readouterr().err
