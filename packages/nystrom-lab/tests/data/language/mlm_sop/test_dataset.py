import json
import pickle

import numpy as np
import pytest
import torch

from nystrom_lab.data.language.mlm_sop.dataset import IGNORED, MlmSop
from nystrom_lab.data.language.mlm_sop.task import prepare_mlm_sop
from nystrom_lab.data.store.token_files import HEADER

CLS, SEP, MASK = 2, 3, 4
ENDS = (17, 18)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, words, sentences):
    """200 documents of 10 to 1,000 tokens, and one without the end of a sentence."""
    path = tmp_path_factory.mktemp("texts") / "a.txt"
    documents = [sentences(2 + i, i) for i in range(200)] + [sentences(50).replace(".", "")]
    path.write_text("\n\n".join(documents))
    return prepare_mlm_sop([path], path.parent / "to", tokenizer=words, length=128, min_tokens=2, workers=1)


@pytest.fixture(scope="module")
def data(folder):
    return MlmSop(folder, "train")


def same(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one) and one.keys() == other.keys()


def original(sample):
    return np.where(sample["labels"] == IGNORED, sample["input_ids"], sample["labels"])


def segments(sample):
    """The words of the segments, as they were, in the order of the text."""
    ids = original(sample)
    first, last = np.flatnonzero(ids == SEP)
    a, b = ids[1:first], ids[first + 1 : last]
    return (b, a) if sample["sentence_order_label"] else (a, b)


def test_an_instance_is_two_segments_of_a_document_that_follow_each_other(data):
    numbers = np.arange(len(data))
    places = data.stretches(numbers)
    for number, sample in zip(numbers, data.__getitems__(numbers.tolist()), strict=True):
        ids = original(sample)
        assert ids.size <= 128
        assert ids[0] == CLS
        ends = np.flatnonzero(ids == SEP)
        assert ends.tolist() == [ends[0], ids.size - 1]
        assert sample["token_type_ids"].tolist() == [0] * (ends[0] + 1) + [1] * (ids.size - 1 - ends[0])
        before, after = segments(sample)
        assert before.size
        assert after.size
        document = data._offsets[places.document[number]]
        start, stop = document + places.start[number], document + places.stop[number]
        assert stop <= data._offsets[places.document[number] + 1]
        np.testing.assert_array_equal(np.concatenate([before, after]), data._tokens[start:stop])


def test_the_first_segment_ends_with_a_sentence_where_it_can(data):
    free = 0
    for sample in data:
        before, after = segments(sample)
        inside = np.isin(np.concatenate([before, after])[:-1], ENDS).any()
        assert (before[-1] in ENDS) == inside
        free += not inside
    assert free


def test_every_token_is_in_one_instance_of_an_epoch_but_for_the_short_ones(data):
    for epoch in (0, 3):
        places = data.stretches(np.arange(len(data)) + epoch * len(data))
        sizes = places.stop - places.start
        assert sizes.min() >= 2
        assert sizes.max() <= 125
        seen = np.zeros(data.tokens, dtype=int)
        for document, start, stop in zip(*places[:3], strict=True):
            seen[data._offsets[document] + start : data._offsets[document] + stop] += 1
        assert seen.max() == 1
        # A tenth of the instances is short, and has half of its tokens on average.
        assert 0.9 < seen.mean() < 0.99


def test_a_tenth_of_the_instances_is_short(folder):
    # Longer than each document, so that whole documents and short ones differ.
    data = MlmSop(folder, "train", length=2000)
    assert len(data) == data.documents
    places = data.stretches(np.arange(50 * len(data)))
    sizes = np.diff(data._offsets)[places.document]
    short = places.stop - places.start < sizes
    # A target above the size of a document changes nothing.
    expected = 0.1 * ((sizes - 2) / 1996).mean()
    assert abs(short.mean() - expected) < 5 * (expected / short.size) ** 0.5


def test_half_of_the_instances_is_swapped(data):
    swapped = np.array([data[number]["sentence_order_label"] for number in range(2 * len(data))])
    assert abs(swapped.mean() - 0.5) < 5 * 0.5 / swapped.size**0.5


@pytest.mark.long
def test_fifteen_in_a_hundred_words_are_chosen_and_eight_of_ten_masked(data):
    words = chosen = masked = kept = replaced = 0
    others = np.zeros(22, dtype=int)
    for number in range(5 * len(data)):
        sample = data[number]
        ids, labels = sample["input_ids"], sample["labels"]
        of_words = ids.size - 3
        at = labels != IGNORED
        assert at.sum() == min(20, max(1, round(0.15 * of_words)))
        assert not np.isin(labels[at], [0, 1, 2, 3, 4]).any()
        assert not np.isin(ids[at], [0, 1, 2, 3]).any(), "a special token in a word's place"
        words, chosen = words + of_words, chosen + at.sum()
        masked += (ids[at] == MASK).sum()
        kept += (ids[at] == labels[at]).sum()
        changed = at & (ids != labels) & (ids != MASK)
        replaced += changed.sum()
        others += np.bincount(ids[changed], minlength=22)
    deviation = 0.4 / chosen**0.5
    # One random word in 17 is the word itself.
    assert abs(masked / chosen - 0.8) < 5 * deviation
    assert abs(replaced / chosen - 0.1 * 16 / 17) < 5 * deviation
    assert abs(kept / chosen - 0.1 * 18 / 17) < 5 * deviation
    assert others[:5].sum() == 0
    assert others[5:].min() > 0.5 * others[5:].mean()
    assert abs(chosen / words - 0.15) < 0.01


def test_no_more_than_80_of_512_tokens_are_chosen(folder):
    data = MlmSop(folder, "train", length=512)
    assert max((sample["labels"] != IGNORED).sum() for sample in data) == round(0.15 * 509) <= 80


def test_unknown_words_are_never_chosen(tmp_path, words, sentences):
    documents = [f"{'strange ' * 30}{sentences(6, i)}" for i in range(30)]
    (tmp_path / "a.txt").write_text("\n\n".join(documents))
    to = prepare_mlm_sop([tmp_path / "a.txt"], tmp_path / "to", tokenizer=words, workers=1)
    for sample in MlmSop(to, "train"):
        assert (original(sample) == 1).any()
        assert not (sample["labels"] == 1).any()


def test_an_instance_is_a_function_of_seed_epoch_and_number(folder, data):
    numbers = [5, 0, len(data) + 5, 3 * len(data) - 1, 5]
    together = data.__getitems__(numbers)
    again = MlmSop(folder, "train")
    for number, sample in zip(reversed(numbers), reversed(together), strict=True):
        assert same(again[number], sample)
    assert not same(together[0], together[2])
    assert not same(MlmSop(folder, "train", seed=1)[5], together[0])
    for each in (data, MlmSop(folder, "val", length=64, seed=3)):
        assert same(pickle.loads(pickle.dumps(each))[7], each[7])


def test_exact_numbers_of_an_instance(folder):
    # The same on every machine and with every version of numpy.
    sample = MlmSop(folder, "val", length=16, seed=11)[6]
    assert sample["input_ids"].tolist() == [2, 7, 8, 10, 8, 17, 7, 10, 3, 4, 5, 10, 7, 6, 4, 3]
    assert sample["token_type_ids"].tolist() == [0] * 9 + [1] * 7
    assert sample["labels"].tolist() == [IGNORED] * 9 + [17] + [IGNORED] * 4 + [17, IGNORED]
    assert sample["sentence_order_label"] == 1


def test_masks_and_meetings_are_drawn_anew_in_each_epoch(data):
    size = len(data)
    number = int(np.argmax(np.diff(data._first) > 3))
    first = int(data._first[number])
    starts = {tuple(data.stretches(np.arange(first, first + 3) + epoch * size).start.tolist()) for epoch in range(9)}
    assert len(starts) > 4
    ids = {data[first + epoch * size]["input_ids"].tobytes() for epoch in range(9)}
    assert len(ids) == 9


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # A machine of one core warns.
def test_workers_change_nothing(data):
    order = [*range(40), *range(len(data), len(data) + 24)]

    how = {"batch_size": 16, "sampler": order, "collate_fn": data.collate}
    loaders = (torch.utils.data.DataLoader(data, num_workers=workers, **how) for workers in (0, 2))
    for one, other in zip(*loaders, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_lengths_are_those_of_the_instances(data):
    for epoch in (0, 2):
        found = [len(data[epoch * len(data) + i]["input_ids"]) for i in range(len(data))]
        assert data.lengths(epoch).tolist() == found


def test_a_folder_serves_any_length(folder):
    long, short = MlmSop(folder, "train", length=1024), MlmSop(folder, "train", length=16)
    assert long.lengths().max() > 128
    assert short.lengths().max() <= 16
    assert len(short) > len(long) == long.documents


def test_a_batch_is_padded_to_a_length(data):
    batch = data.collate(data.__getitems__([*range(4)]), length=128)
    assert batch["input_ids"].shape == (4, 128)
    assert batch["attention_mask"].sum(dim=1).tolist() == data.lengths()[:4].tolist()
    assert batch["labels"][~batch["attention_mask"]].unique().tolist() == [IGNORED]
    assert batch["input_ids"][~batch["attention_mask"]].unique().tolist() == [0]
    with pytest.raises(ValueError, match="length is 8, and an instance has 128 tokens"):
        data.collate([data[len(data) - 1 - i] for i in range(9)], length=8)


def test_what_cannot_be_opened_is_named(folder, tmp_path, data):
    for arguments, options, message in (
        ((folder, "test"), {}, "test of .* is empty: documents are in train, those held out in val"),
        ((folder, "dev"), {}, "split is 'dev'"),
        ((folder, "train"), {"length": 7}, "length is 7; expected a whole number of at least 8"),
        ((folder, "train"), {"seed": -1}, "seed is -1"),
        ((tmp_path / "gone", "train"), {}, "data prepare mlm-sop --from FILES --tokenizer FOLDER --to"),
    ):
        with pytest.raises(ValueError, match=message):
            MlmSop(*arguments, **options)
    with pytest.raises(IndexError, match="number -1 is below 0"):
        data[-1]


def test_a_header_without_a_vocabulary_is_damaged(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    header = json.loads((folder / HEADER).read_text())
    header["facts"]["vocabulary"]["mask_token_id"] = 99
    (tmp_path / HEADER).write_text(json.dumps(header))
    with pytest.raises(ValueError, match="describes no vocabulary: the prepared data are damaged"):
        MlmSop(tmp_path, "train")
