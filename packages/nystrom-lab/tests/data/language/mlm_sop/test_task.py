import itertools
import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from nystrom_lab.cli.main import main
from nystrom_lab.data.language.mlm_sop.task import prepare_mlm_sop
from nystrom_lab.data.store.prepared_folder import verify
from nystrom_lab.data.store.token_files import HEADER, SPLITS, open_split


def prepare(source, to, words, **options):
    return prepare_mlm_sop([Path(source)], to, tokenizer=words, workers=1, **options)


def documents(folder, split):
    tokens, offsets, _ = open_split(folder, split, task="mlm-sop")
    return [tokens[start:stop].tolist() for start, stop in itertools.pairwise(offsets)]


def test_each_document_is_tokenised_whole_and_is_in_one_split(tmp_path, texts, words):
    from transformers import AutoTokenizer

    to = prepare(texts, tmp_path / "to", words)
    tokenizer = AutoTokenizer.from_pretrained(str(to))
    wanted = [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)) for text in texts.read_text().split("\n\n")]
    assert min(map(len, wanted)) > 9, "longer than the tokenizer's own truncation and padding"
    train, val, test = (documents(to, split) for split in SPLITS)
    assert test == []
    assert sorted(train + val) == sorted(wanted)
    assert [document for document in wanted if document in train] == train
    # 12 of 60 on average, with a deviation of 3.
    assert 3 <= len(val) <= 21
    assert open_split(to, "train", task="mlm-sop").tokens.dtype == np.uint16
    verify(to, task="mlm-sop")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_place_of_a_document_is_a_matter_of_its_text_and_the_seed(tmp_path, texts, words):
    to = prepare(texts, tmp_path / "a", words)
    turned = tmp_path / "turned.txt"
    turned.write_text("\n\n".join([*reversed(texts.read_text().strip().split("\n\n")), "the cat sat. " * 9]) + "\n")
    again = prepare(turned, tmp_path / "b", words)
    new = {tuple(document) for document in documents(again, "val")} - {tuple(d) for d in documents(to, "val")}
    assert len(new) <= 1
    other = prepare(texts, tmp_path / "c", words, seed=1)
    assert sorted(documents(other, "val")) != sorted(documents(to, "val"))
    more = prepare(texts, tmp_path / "d", words, held_out=0.5)
    held = {tuple(document) for document in documents(more, "val")}
    assert {tuple(document) for document in documents(to, "val")} < held


def test_special_tokens_in_a_text_are_letters_and_unk_of_wikitext_is_unknown(tmp_path, words, sentences):
    text = f"the cat [SEP] [MASK] [PAD] {sentences(5)}"
    (tmp_path / "a.txt").write_text("\n\n".join(f"{text} {sentences(3, i)}" for i in range(30)))
    to = prepare(tmp_path / "a.txt", tmp_path / "a", words)
    found = np.concatenate([np.concatenate(documents(to, split)) for split in ("train", "val")])
    assert not np.isin(found, [0, 2, 3, 4]).any()
    articles = [f" \n = cat = \n \n the <unk> sat on the mat . {sentences(3, i)} \n" for i in range(30)]
    (tmp_path / "wiki.tokens").write_text("".join(articles))
    wiki = prepare(tmp_path / "wiki.tokens", tmp_path / "wiki", words)
    assert len(documents(wiki, "train")) + len(documents(wiki, "val")) == 30
    # = cat = the [UNK] sat
    assert documents(wiki, "train")[0][:6] == [19, 6, 19, 5, 1, 8]


def test_short_documents_and_broken_letters_are_counted_and_said(tmp_path, words, sentences, capsys):
    lines = [sentences(5, i).encode() for i in range(40)]
    lines[7] = b"the cat."
    content = b"\n\n".join(lines) + b"\n\n" + b"x" * (1 << 16) + b"\n\nthe cat \xff sat. " + lines[0]
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.txt").write_bytes(content)
    (tmp_path / "more" / "b.bin").write_bytes(b"\0")
    to = prepare(tmp_path / "more", tmp_path / "to", words)
    said = capsys.readouterr().err
    assert "to: 40 documents; 2 with fewer tokens than --min-tokens left out; 1 with bytes that are not UTF-8" in said
    assert "1 files of other kinds not read (b.bin)" in said
    facts = json.loads((to / HEADER).read_text())["facts"]
    assert (facts["documents"], facts["documents_too_short"], facts["documents_not_utf_8"]) == (40, 2, 1)


def test_a_prepared_folder_is_used_again_and_other_settings_are_not_mixed_in(tmp_path, texts, words, capsys):
    to = prepare(texts, tmp_path / "to", words)
    before = (to / HEADER).stat().st_mtime_ns
    assert prepare(texts, tmp_path / "to", words) == to
    assert "already holds this data set" in capsys.readouterr().err
    assert (to / HEADER).stat().st_mtime_ns == before
    with pytest.raises(ValueError, match=r"holds a data set with other settings .*length=512 there and 64 asked for"):
        prepare(texts, to, words, length=64)
    texts.write_text(texts.read_text() + "\n\nmore")
    with pytest.raises(ValueError, match=r"other settings .*source_sha256"):
        prepare(texts, to, words)


def test_a_damaged_tokenizer_is_found_by_verify(tmp_path, texts, words):
    to = prepare(texts, tmp_path / "to", words)
    (to / "tokenizer.json").write_text((to / "tokenizer.json").read_text().replace("cat", "cow"))
    with pytest.raises(ValueError, match=r"tokenizer.json has SHA-256 .* --tokenizer FOLDER --to NEW_FOLDER"):
        verify(to)


def test_mistakes_are_named_before_the_work_and_leave_nothing(tmp_path, texts, words):
    (tmp_path / "short.txt").write_text("the cat.\n\nthe dog.\n")
    (tmp_path / "one.txt").write_text("the cat sat. " * 20)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("mine")
    there = sorted(tmp_path.rglob("*"))
    for source, options, message in (
        (texts, {"length": 7}, "--length is 7; expected a whole number of at least 8"),
        (texts, {"held_out": 1.0}, "--held-out is 1.0; expected a share between 0 and 1"),
        (texts, {"min_tokens": 1}, "--min-tokens is 1; expected a whole number of at least 2"),
        (texts, {"seed": -1}, "--seed is -1"),
        (texts, {"seed": 2**63}, "--seed is 9223372036854775808; expected a .* from 0 to 9223372036854775807"),
        (texts, {"to": tmp_path / "taken"}, "taken is not empty and holds no data set"),
        (texts, {"to": texts / "to"}, "texts.txt/to is a file or inside one|cannot be made"),
        (texts, {"to": Path("/proc/nystrom/to")}, "cannot be made .*: name a folder inside one you may write to"),
        (tmp_path / "short.txt", {}, "none of the first 2 documents has 16 tokens: a blank line ends a document"),
        (tmp_path / "one.txt", {}, "gets none of the 1 documents: add documents, or use another --held-out than 0.2"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            prepare(source, **{"to": tmp_path / "to", "words": words} | options)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="--workers is 0"):
        prepare_mlm_sop([texts], tmp_path / "to", tokenizer=words, workers=0)
    assert sorted(tmp_path.rglob("*")) == there


def test_the_commands_prepare_show_and_verify(tmp_path, texts, words, capsys):
    (tmp_path / "texts.txt.xz").write_bytes(lzma.compress(texts.read_bytes()))
    to = str(tmp_path / "to")
    command = ["data", "prepare", "mlm-sop", "--from", str(texts), str(tmp_path / "texts.txt.xz"), "--to", to]
    assert main([*command, "--tokenizer", str(words), "--length", "64", "--workers", "1"]) == 0
    assert capsys.readouterr().out == f"{to}\n"
    assert main(["data", "verify", to]) == 0
    assert "tokenizer.json      ok" in capsys.readouterr().out
    assert main(["data", "show", "mlm-sop", "--data", to, "--split", "val", "--count", "3"]) == 0
    assert capsys.readouterr().out.count("[CLS]") == 3
    assert main(["data", "show", "mlm-sop", "--data", to, "--split", "test"]) == 2
    assert "test of" in capsys.readouterr().err
    assert main([*command[:4], str(tmp_path / "gone"), "--to", to, "--tokenizer", str(words)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
