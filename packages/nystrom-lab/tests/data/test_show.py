import pytest

from nystrom_lab.cli.main import main
from nystrom_lab.data.lra.listops.task import prepare_listops
from nystrom_lab.data.lra.texts.retrieval import prepare_retrieval
from nystrom_lab.data.lra.texts.reviews import prepare_text
from nystrom_lab.data.show import show


@pytest.fixture
def texts(tmp_path):
    rows = "".join(f'"line {i}\n\x1b[31mred \u00fc{"x" * 700 if i == 0 else ""}",c{i % 2}\n' for i in range(50))
    (tmp_path / "a.csv").write_text("text,label\n" + rows)
    return prepare_text(tmp_path / "a.csv", tmp_path / "text")


def test_texts_are_shown_with_their_class_and_cannot_steer_the_terminal(texts):
    shown = list(show("text", texts, split="train", count=50))
    assert len(shown) == 40
    for text in shown:
        head, body, end = text.split("\n")
        number = int(body.split("\\n")[0].removeprefix("line "))
        assert f"class c{number % 2}, " in head
        assert body.startswith(f"line {number}\\n\\x1b[31mred \u00fc")
        assert body.endswith(" ...") == (number == 0)
        assert not end
    # Fewer are spread over the split.
    assert [text.split(":")[0] for text in show("text", texts, count=3)] == ["train 0", "train 20", "train 39"]


def test_pairs_show_both_documents(tmp_path):
    rows = "".join(f"a{i}\tb{i}\tc{i % 2}\n" for i in range(50))
    (tmp_path / "a.tsv").write_text("text1\ttext2\tlabel\n" + rows)
    to = prepare_retrieval(tmp_path / "a.tsv", tmp_path / "to")
    head, first, second, _ = next(show("retrieval", to, split="test")).split("\n")
    assert head.startswith("test 0: class c")
    assert first[1:] == second[1:]
    assert (first[0], second[0]) == ("a", "b")


def test_expressions_are_shown_with_their_value(tmp_path):
    to = prepare_listops(tmp_path / "to", train=3, val=1, test=1, min_length=5, max_length=30, workers=1)
    for text in show("listops", to):
        head, body, _ = text.split("\n")
        assert f"{len(body.split())} tokens" in head
        assert body.startswith("[")


def test_bytes_that_are_no_text_are_shown_by_number(tmp_path):
    (tmp_path / "a.tsv").write_bytes(b"text\tlabel\n" + b"".join(b"\xff%d\t%d\n" % (i, i % 2) for i in range(50)))
    to = prepare_text(tmp_path / "a.tsv", tmp_path / "to")
    assert "\n\\xff" in next(show("text", to))


def test_what_cannot_be_shown_raises(texts, tmp_path):
    for arguments, options, message in (
        (("texts", texts), {}, "task 'texts' is unknown; .* Perhaps you meant 'text'"),
        (("text", texts), {"count": 0}, "--count is 0; expected a whole number of at least 1"),
        (("text", texts), {"to": tmp_path / "a.png"}, "text is printed and makes no picture"),
        (("text", texts), {"split": "dev"}, "split is 'dev'; expected one of train, val, test"),
        (("retrieval", texts), {}, "holds the data of text, not of retrieval"),
        (("text", tmp_path / "gone"), {}, "gone is not a folder: prepare the data with"),
    ):
        with pytest.raises(ValueError, match=message):
            list(show(*arguments, **options))


def test_the_commands_prepare_and_show(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"t{i},{i % 2}\n" for i in range(50)))
    to = str(tmp_path / "to")
    assert main(["data", "prepare", "text", "--from", str(tmp_path / "a.csv"), "--to", to]) == 0
    assert capsys.readouterr().out == f"{to}\n"
    assert main(["data", "show", "text", "--data", to, "--count", "2"]) == 0
    assert capsys.readouterr().out.count("class") == 2
    assert main(["data", "prepare", "retrieval", "--from", str(tmp_path / "gone"), "--to", to]) == 2
    assert "gone, which does not exist" in capsys.readouterr().err
