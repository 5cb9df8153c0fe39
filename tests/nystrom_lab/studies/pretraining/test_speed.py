"""The loops are compared in one run, and rows say what was compared."""

import pytest
from transformers import BertTokenizer

from nystrom_lab.data.language.mlm_sop.task import prepare_mlm_sop
from nystrom_lab.measure.rows import read_rows
from nystrom_lab.studies.pretraining.speed import run_pretraining_speed


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    place = tmp_path_factory.mktemp("data")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three", "."]
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(str(place / "tokenizer"))
    (place / "texts.txt").write_text("\n\n".join("one two three. " * (10 + i) for i in range(12)))
    return prepare_mlm_sop(
        [place / "texts.txt"], place / "to", tokenizer=place / "tokenizer", length=32, workers=1, progress=False
    )


SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.slow
def test_each_loop_is_measured_in_each_round(data, tmp_path):
    rows = run_pretraining_speed(
        data=data, to=tmp_path, length=16, batch_size=2, steps=2, rounds=3, device="cpu", **SMALL
    )
    assert rows == read_rows(tmp_path / "pretraining.csv")
    loops = ("nystrom pretrain", "run_mlm, same encoder", "run_mlm, BERT")
    wanted = [*loops, *(f"{loops[0]} / {other}" for other in loops[1:])]
    assert [row.quantity for row in rows] == [
        f"tokens per {second} of {what}" for second in ("second", "CPU second") for what in wanted
    ]
    assert all(row.repeats == 3 and 0 < row.low <= row.value <= row.high for row in rows)
    assert [row.unit for row in rows] == 2 * [*["1/s"] * 3, "", ""]


def test_too_few_tokens_for_the_steps_are_named(data, tmp_path):
    with pytest.raises(ValueError, match="use fewer steps"):
        run_pretraining_speed(data=data, to=tmp_path, length=16, batch_size=2, steps=1000, device="cpu", **SMALL)
