from dataclasses import asdict, replace

import numpy as np
import pytest

from nystrom_lab.data.language.mlm_sop.vocabulary import open_tokenizer, read_vocabulary, vocabulary_of


@pytest.fixture(scope="module")
def vocabulary(words):
    return read_vocabulary(open_tokenizer(words))


def test_special_tokens_are_no_words_and_sentences_end_at_marks(vocabulary):
    assert vocabulary.size == 22
    assert vocabulary.no_words == (0, 1, 2, 3, 4)
    ids = (vocabulary.pad_token_id, vocabulary.cls_token_id, vocabulary.sep_token_id, vocabulary.mask_token_id)
    assert ids == (0, 2, 3, 4)
    assert vocabulary.sentence_ends == (17, 18)
    assert vocabulary.dtype is np.uint16
    assert replace(vocabulary, size=2**16 + 1).dtype is np.uint32
    assert vocabulary.table((17, 18)).nonzero()[0].tolist() == [17, 18]


def test_the_header_gives_the_vocabulary_back_or_nothing(vocabulary):
    written = {name: [*value] if isinstance(value, tuple) else value for name, value in asdict(vocabulary).items()}
    assert vocabulary_of(written) == vocabulary
    changes = [("size", 3), ("size", "22"), ("mask_token_id", None), ("cls_token_id", -1), ("sentence_ends", [22])]
    changes += [("sentence_ends", [True]), ("no_words", [0, 1, 2, 3]), ("no_words", [*range(22)])]
    for name, value in changes:
        assert vocabulary_of(written | {name: value}) is None, (name, value)
    assert vocabulary_of({}) is None


def test_a_tokenizer_of_bytes_has_its_own_marks(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokens = ["<s>", "</s>", "<pad>", "<mask>", "<unk>", "Ġ.", ".", "Ġa", "▁!", "..."]
    backend = Tokenizer(models.WordLevel({token: 2 * number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token="<s>", sep_token="</s>", pad_token="<pad>", mask_token="<mask>"
    ).save_pretrained(str(tmp_path))
    vocabulary = read_vocabulary(open_tokenizer(tmp_path))
    # Numbers that no token has are no words either.
    assert vocabulary.size == 19
    assert {*range(1, 19, 2)} | {0, 2, 4, 6} == {*vocabulary.no_words}
    assert vocabulary.sentence_ends == (10, 12, 16, 18)


def test_what_is_no_tokenizer_for_masks_is_named(tmp_path, words):
    from transformers import AutoTokenizer

    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    tokenizer = AutoTokenizer.from_pretrained(str(words))
    tokenizer.mask_token = None
    tokenizer.save_pretrained(str(tmp_path / "causal"))
    for folder, message in (
        ("gone", "gone, which is not a folder: name the folder of a model"),
        ("empty", "empty, from which no tokenizer can be read"),
        ("broken", "broken, from which no tokenizer can be read"),
        ("causal", "causal, which has no mask_token: masked words and sentence order need all of cls_token"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            open_tokenizer(tmp_path / folder)
        assert "\n" not in str(caught.value)
