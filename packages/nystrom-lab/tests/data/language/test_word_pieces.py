import subprocess
import sys

import pytest

from nystrom_lab.cli.main import main
from nystrom_lab.data.language.word_pieces import train_tokenizer


@pytest.fixture
def texts(tmp_path):
    words = ["low", "lower", "lowest", "new", "newer", "newest", "wide", "wider", "über", "Grün", "25°c", "it's"]
    lines = [" ".join(words[i % 12 :] + words[: i % 5]) + ". Yes!" for i in range(60)]
    (tmp_path / "a.txt").write_text("\n\n".join(lines))
    return tmp_path / "a.txt"


def train(texts, to, **options):
    return train_tokenizer([texts], to, **options)


def test_a_trained_tokenizer_loads_and_cuts_words(tmp_path, texts):
    from transformers import AutoTokenizer

    to = train(texts, tmp_path / "to", size=100)
    tokenizer = AutoTokenizer.from_pretrained(str(to))
    assert tokenizer.tokenize("Lowest, \u00dcber!")[0] == "lowest"
    assert tokenizer.tokenize("lowwide")[-1].startswith("##")
    assert tokenizer.unk_token not in tokenizer.tokenize("uber grun 25\u00b0c it's.")
    specials = [tokenizer.convert_ids_to_tokens(i) for i in range(5)]
    assert specials == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert sorted(tokenizer.all_special_ids) == [0, 1, 2, 3, 4]
    assert tokenizer("low", "new")["token_type_ids"] == [0, 0, 0, 1, 1]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_vocabulary_is_the_same_in_every_run(tmp_path, texts):
    # The trainer's own order of letters inside words differs between any two runs.
    first, *others = ((train(texts, tmp_path / str(i)) / "tokenizer.json").read_bytes() for i in range(4))
    assert all(other == first for other in others)


def test_capitals_and_accents_can_be_kept(tmp_path, texts):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(train(texts, tmp_path / "to", cased=True)))
    assert tokenizer.tokenize("Gr\u00fcn gr\u00fcn")[0] == "Gr\u00fcn"
    assert "\u00fcber" in tokenizer.get_vocab()


def test_the_command_trains(tmp_path, texts, capsys):
    to = str(tmp_path / "to")
    assert main(["tokenizer", "train", "--from", str(texts), "--size", "300", "--to", to]) == 0
    out, err = capsys.readouterr()
    assert out == f"{to}\n"
    assert "of the 300 requested tokens" in err
    assert main(["tokenizer", "train", "--from", str(texts), "--to", to]) == 2
    assert "to already exists: name a folder that does not exist yet" in capsys.readouterr().err


def test_mistakes_are_named(tmp_path, texts):
    for options, message in (
        ({"size": 20}, "--size is 20; expected a whole number of at least 100"),
        ({"min_frequency": 0}, "--min-frequency is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            train(texts, tmp_path / "to", **options)
    with pytest.raises(ValueError, match="gone does not exist"):
        train(tmp_path / "gone", tmp_path / "to")
    for to in (texts / "to", "/proc/nystrom"):
        with pytest.raises(ValueError, match=r"cannot be made \(.*\): name a folder inside one you may write to"):
            train(texts, to)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="sizes of files are limited by POSIX")
def test_a_full_disk_ends_in_one_line_and_leaves_nothing(tmp_path, texts):
    # A limit such as `ulimit -f`, in a process of its own: no file may have more than 1,000 bytes.
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))"
    code += "; from nystrom_lab.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = ["tokenizer", "train", "--from", str(texts), "--to", str(tmp_path / "to")]
    done = subprocess.run([sys.executable, "-B", "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "to cannot be written (File too large): free space, or name a folder on another disk" in line
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
