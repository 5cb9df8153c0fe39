import re

from nystrom_lab.data.language.mlm_sop.dataset import IGNORED, MlmSop
from nystrom_lab.data.language.mlm_sop.task import prepare_mlm_sop
from nystrom_lab.data.show import show


def test_instances_are_shown_with_what_is_behind_each_mask(tmp_path, texts, words):
    to = prepare_mlm_sop([texts], tmp_path / "to", tokenizer=words, length=64, workers=1)
    data = MlmSop(to, "train")
    shown = list(show("mlm-sop", to, count=len(data)))
    tokens = {number: token for token, number in vocabulary(to).items()}
    assert len(shown) == len(data)
    for text, sample in zip(shown, data, strict=True):
        head, body, _ = text.split("\n")
        order = "swapped" if sample["sentence_order_label"] else "in order"
        count = (sample["labels"] != IGNORED).sum()
        assert f"segments {order}, {count} of {len(sample['input_ids'])} tokens to predict" in head
        pairs = [re.fullmatch(r"\{(.+)=(.+)\}", word) for word in body.split()]
        seen = [pair[1] if pair else word for pair, word in zip(pairs, body.split(), strict=True)]
        assert seen == [tokens[number] for number in sample["input_ids"].tolist()]
        assert [pair[2] for pair in pairs if pair] == [tokens[i] for i in sample["labels"].tolist() if i != IGNORED]


def vocabulary(folder):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
