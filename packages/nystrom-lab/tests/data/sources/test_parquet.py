import pytest

from nystrom_lab.data.sources.arrow_files import arrow_fields

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
WANTED = {"text_field": ("text",)}
ROWS = 3_000


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.parquet"
    table = arrow.table({"text": [f"text {row}" for row in range(ROWS)]})
    parquet.write_table(
        table, path, compression="none", use_dictionary=False, row_group_size=1_000, write_page_checksum=True
    )
    return path


def damage(path, place, count):
    content = bytearray(path.read_bytes())
    content[place : place + count] = bytes(byte ^ 0xFF for byte in content[place : place + count])
    path.write_bytes(content)


def test_rows_of_all_groups_are_read(file):
    assert [fields for _, fields in arrow_fields(file, WANTED)] == [[b"text %d" % row] for row in range(ROWS)]


# The header of a page, and then its rows, which would be read as others without their checksum.
@pytest.mark.parametrize(("behind", "count"), [(0, 16), (500, 1)])
def test_a_file_that_is_damaged_inside_is_named_with_the_row(file, behind, count):
    damage(file, parquet.ParquetFile(file).metadata.row_group(2).column(0).data_page_offset + behind, count)
    says = r"train\.parquet cannot be read after row 2000 \(.+\): it is damaged, fetch it again\.$"
    with pytest.raises(ValueError, match=says) as raised:
        list(arrow_fields(file, WANTED))
    assert "\n" not in str(raised.value)
