import lzma

import pytest

from nystrom_lab.data.language.encoder_texts import read_prose

TEXT = "Die Brücke über den Fluß.\n\nThe hill, and the road.\n"


def test_other_words_have_another_name(tmp_path):
    file, names = tmp_path / "prose.txt", set()
    for text in (TEXT, TEXT + "x"):
        file.write_text(text)
        names.add(read_prose([file]).name)
    assert len(names) == 2


@pytest.mark.parametrize(
    ("content", "says"), [(b"\xff\xfe\x00words", "UTF-8"), (b"  \n", "empty"), (None, "does not exist")]
)
def test_no_prose_ends_in_one_line(content, says, tmp_path):
    file = tmp_path / "prose.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=says) as error:
        read_prose([file])
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("café naïve ".encode("latin-1") * 300_000, "is not UTF-8 text"),
        (b"plain " * 20_000 + "café naïve ".encode("latin-1") * 300_000, r"is not UTF-8 text .* at byte 120003"),
        (bytes(range(256)) * 12_000, "byte 0 is 0"),
        (("hello " * 600_000).encode("utf-16"), "is UTF-16"),
    ],
)
def test_long_files_are_checked_as_short_ones_are(content, says, tmp_path):
    file = tmp_path / "prose.txt"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=says):
        read_prose([file])


@pytest.mark.parametrize("before", ["", "a", "ab"])
def test_a_cut_inside_a_character_drops_that_one_alone(before, tmp_path):
    file = tmp_path / "prose.txt"
    file.write_text(before + "€" * 800_000, encoding="utf-8")
    assert read_prose([file]).text == before + "€" * ((2_000_000 - len(before)) // 3)


def test_a_damaged_archive_ends_in_one_line(tmp_path):
    file = tmp_path / "prose.xz"
    file.write_bytes(lzma.compress(TEXT.encode() * 100)[:-20])
    with pytest.raises(ValueError, match=r"prose\.xz"):
        read_prose([file])
