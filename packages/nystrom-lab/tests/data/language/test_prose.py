import pytest

from nystrom_lab.data.language.encoder_texts import read_prose

TEXT = "Die Brücke über den Fluß.\n\nThe hill, and the road.\n"


def test_other_words_have_another_name(tmp_path):
    file, names = tmp_path / "prose.txt", set()
    for text in (TEXT, TEXT + "x"):
        file.write_text(text)
        names.add(read_prose([file]).name)
    assert len(names) == 2


@pytest.mark.parametrize("before", ["", "a", "ab"])
def test_a_cut_inside_a_character_drops_that_one_alone(before, tmp_path):
    file = tmp_path / "prose.txt"
    file.write_text(before + "€" * 800_000, encoding="utf-8")
    assert read_prose([file]).text == before + "€" * ((2_000_000 - len(before)) // 3)
