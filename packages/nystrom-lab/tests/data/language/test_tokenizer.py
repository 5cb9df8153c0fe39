"""The tokenizer beside a model is found, or what is missing is named."""

import importlib.util
import json
import struct

import pytest

from nystrom_lab.data.language.tokenizer import load_tokenizer

DEEP = '{"a": ' + "[" * 5000 + "]" * 5000 + "}"


def varint(number):
    """A number as protocol buffers have it."""
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def write_spiece(file):
    """A unigram model of SentencePiece, by hand: tag, length and content of each field."""
    normal, unknown, control, user = 1, 2, 3, 4
    pieces = [("<pad>", 0.0, control), ("<unk>", 0.0, unknown), ("[CLS]", 0.0, control), ("[SEP]", 0.0, control)]
    pieces.append(("[MASK]", 0.0, user))
    words = ["paris", "is", "the", "capital", "of", "france"]
    pieces += [(f"▁{word}", -1.0 - i, normal) for i, word in enumerate(words)]
    pieces += [(letter, -30.0, normal) for letter in "▁.abcdefghijklmnopqrstuvwxyz"]
    blob = b""
    for text, score, kind in pieces:
        raw = text.encode()
        body = b"\x0a" + varint(len(raw)) + raw + b"\x15" + struct.pack("<f", score) + b"\x18" + varint(kind)
        blob += b"\x0a" + varint(len(body)) + body
    # model_type = UNIGRAM, unk_id, bos_id, eos_id, pad_id
    trainer = b"\x18\x01" + b"".join(
        varint(field << 3) + varint(i) for field, i in ((40, 1), (41, 2), (42, 3), (43, 0))
    )
    file.write_bytes(blob + b"\x12" + varint(len(trainer)) + trainer)


def test_a_saved_tokenizer_is_read(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)("paris is the [MASK]")["input_ids"] == tokenizer("paris is the [MASK]")["input_ids"]


def test_a_folder_with_spiece_model_alone_is_read_as_albert(tmp_path):
    pytest.importorskip("sentencepiece")
    write_spiece(tmp_path / "spiece.model")
    read = load_tokenizer(tmp_path)
    tokens = read.convert_ids_to_tokens(read("Paris is the [MASK] of France")["input_ids"])
    assert tokens == ["[CLS]", "▁paris", "▁is", "▁the", "[MASK]", "▁of", "▁france", "[SEP]"]


def test_the_package_that_reads_spiece_model_is_named(tmp_path, monkeypatch):
    write_spiece(tmp_path / "spiece.model")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "nystrom_lab.data.language.tokenizer.find_spec", lambda name: None if name == "sentencepiece" else found(name)
    )
    with pytest.raises(ValueError, match=r"is spiece.model, which the package sentencepiece reads: pip install"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, r"holds no tokenizer \(tokenizer.json, spiece.model.*copy the files"),
        ({"tokenizer_config.json": "{}"}, "holds no tokenizer"),
        ({"tokenizer.json": "{"}, "tokenizer.json is not valid JSON"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "[]"}, "tokenizer_config.json holds a list"),
        (
            {"tokenizer.json": json.dumps({"version": "1.0"}), "tokenizer_config.json": '{"tokenizer_class": "Magic"}'},
            "cannot be read",
        ),
        ({"vocab.txt": "a", "special_tokens_map.json": DEEP}, "special_tokens_map.json is nested more than"),
        ({"vocab.txt": "a", "added_tokens.json": DEEP}, "added_tokens.json is nested more than"),
        ({"vocab.txt": "a", "config.json": DEEP}, "config.json is nested more than"),
        # The package tokenizers raises no error of its own kind.
        (
            {"vocab.json": "{}", "merges.txt": "a", "tokenizer_config.json": '{"tokenizer_class": "RobertaTokenizer"}'},
            "cannot be read",
        ),
    ],
)
def test_a_tokenizer_that_is_none_is_refused(files, says, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=says):
        load_tokenizer(tmp_path)


def test_code_in_the_folder_is_not_run(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(ValueError, match="cannot be read"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "mark").exists()
