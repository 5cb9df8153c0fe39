import json

import pyarrow
import pytest
from pyarrow import parquet

from nystrom_lab.data.sources.arrow_files import arrow_fields, is_saved_dataset, saved_parts

WANTED = {"label_field": ("label",), "text_field": ("text",)}


def test_rows_are_read_in_the_order_of_the_files_and_numbers_become_the_names_of_classes(save_arrow):
    saved = save_arrow({"text": list("abcde"), "label": [1, 0, -1, 2, 1]}, {"label": ["no", "yes"]}, files=3)
    assert is_saved_dataset(saved)
    (part,) = saved_parts(saved).values()
    assert (part.columns, part.classes) == (("text", "label"), {"label": ("no", "yes")})
    # A number without a name stays.
    labels = [b"yes", b"no", b"-1", b"2", b"yes"]
    assert [*arrow_fields(part, WANTED)] == [(i + 1, [label, b"abcde"[i : i + 1]]) for i, label in enumerate(labels)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("state.json", "{", r"state\.json cannot be read \(it is not valid JSON"),
        ("state.json", "[]", "it holds a list; expected a JSON object"),
        ("state.json", {"_data_files": []}, "it names no files of rows"),
        ("state.json", {"_data_files": [{"filename": "../other.arrow"}]}, "it names no files of rows"),
        ("state.json", {"_data_files": [{"filename": "gone.arrow"}]}, r"gone\.arrow cannot be read"),
        (
            "state.json",
            {"_data_files": [{"filename": "a.arrow"}], "_indices_data_files": [{"filename": "i.arrow"}]},
            "by a file of indices",
        ),
        ("data-00000-of-00001.arrow", "not Arrow", r"data-00000-of-00001\.arrow cannot be read"),
        ("dataset_dict.json", {"splits": ["..", "train"]}, "it names no splits"),
    ],
)
def test_what_is_broken_is_named_in_one_line(save_arrow, name, content, message):
    saved = save_arrow({"text": ["a"]})
    (saved / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=message) as raised:
        saved_parts(saved)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_cut_short_is_named(save_arrow):
    saved = save_arrow({"text": ["a" * 50] * 2000})
    file = saved / "data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes()[:50_000])
    (part,) = saved_parts(saved).values()
    with pytest.raises(ValueError, match=r"arrow cannot be read \(.*\): save the data set again"):
        list(arrow_fields(part, {"text_field": ("text",)}))


@pytest.mark.parametrize("batches", [0, 1, 2])
def test_a_file_that_ends_after_a_whole_batch_is_named(batches, save_arrow):
    # This label in eight bytes is the mark at the end of a stream.
    label = 2**32 - 1
    table = pyarrow.table({"text": ["a", "b", "c"], "label": [label] * 3})
    file = save_arrow({"text": ["a"], "label": [0]}) / "data-00000-of-00001.arrow"
    with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=1)
    whole = file.read_bytes()
    with pyarrow.BufferReader(whole) as source, pyarrow.ipc.open_stream(source) as stream:
        ends = [source.tell(), *(source.tell() for _ in stream)]
    (part,) = saved_parts(file.parent).values()
    assert [label for _, (label, _) in arrow_fields(part, WANTED)] == [b"%d" % label] * 3
    file.write_bytes(whole[: ends[batches]])
    assert not batches or whole[: ends[batches]].endswith(whole[-8:])
    with pytest.raises(ValueError, match=r"cannot be read \(it ends before its end mark, so rows may be missing\)"):
        list(arrow_fields(part, WANTED))


def test_what_the_package_itself_saves_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(str(tmp_path / "saved"))
    parts = saved_parts(tmp_path / "saved")
    assert [*arrow_fields(parts["train"], WANTED)] == [(1, [b"yes", b"a"]), (2, [b"no", b"b"])]
    assert [*arrow_fields(parts["test"], WANTED)] == [(1, [b"no", b"b"])]


TEXT = {"text_field": ("text",)}
ROWS = 3_000


@pytest.fixture
def file(tmp_path):
    path, how = tmp_path / "train.parquet", {"compression": "none", "use_dictionary": False, "row_group_size": 1_000}
    table = pyarrow.table({"text": [f"text {row}" for row in range(ROWS)]})
    parquet.write_table(table, path, write_page_checksum=True, **how)
    return path


def damage(path, place, count):
    content = bytearray(path.read_bytes())
    content[place : place + count] = bytes(byte ^ 0xFF for byte in content[place : place + count])
    path.write_bytes(content)


def test_rows_of_all_groups_are_read(file):
    assert [fields for _, fields in arrow_fields(file, TEXT)] == [[b"text %d" % row] for row in range(ROWS)]


# The header of a page, and then its rows, which would be read as others without their checksum.
@pytest.mark.parametrize(("behind", "count"), [(0, 16), (500, 1)])
def test_a_file_that_is_damaged_inside_is_named_with_the_row(file, behind, count):
    damage(file, parquet.ParquetFile(file).metadata.row_group(2).column(0).data_page_offset + behind, count)
    says = r"train\.parquet cannot be read after row 2000 \(.+\): it is damaged, fetch it again\.$"
    with pytest.raises(ValueError, match=says) as raised:
        list(arrow_fields(file, TEXT))
    assert "\n" not in str(raised.value)
