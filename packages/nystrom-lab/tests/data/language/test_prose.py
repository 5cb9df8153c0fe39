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


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("texts.jsonl", '{"text": "The hill.", "label": 1}\n{"text": "The road.\\nIt bends.", "label": 0}\n'),
        ("texts.csv", 'label,text\n1,The hill.\n0,"The road.\nIt bends."\n'),
    ],
)
def test_a_file_of_rows_is_read_as_its_texts(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    assert read_prose([tmp_path / name]).text == "The hill.\n\nThe road.\nIt bends."


def test_rows_without_a_text_are_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("label,score\n1,2\n")
    with pytest.raises(ValueError, match=r"rows.csv, line 1: .* no 'text' .*: write the texts to a text file"):
        read_prose([tmp_path / "rows.csv"])
