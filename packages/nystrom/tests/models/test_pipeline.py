"""transformers' pipeline fills masks with a model of this library, as in the Hugging Face post on Nyströmformer."""

import itertools

import pytest
import torch
from transformers import pipeline

from nystrom.models import EncoderForMaskedLM

LINES = [
    "Paris is the [MASK] of France.",
    "a [MASK] hides a word , and so do others .",
    "[MASK]",
]


def words_of(filled):
    return [(word["token"], word["sequence"]) for word in filled]


def test_a_folder_and_its_model_fill_the_same_words_with_the_probabilities_of_the_model(mask_filler, tokenizer):
    by_folder = pipeline("fill-mask", model=str(mask_filler))
    assert type(by_folder.model) is EncoderForMaskedLM
    model = EncoderForMaskedLM.from_pretrained(mask_filler)
    by_object = pipeline("fill-mask", model=model, tokenizer=tokenizer)
    for line in LINES:
        filled = by_folder(line)
        assert words_of(filled) == words_of(by_object(line))
        inputs = tokenizer(line, return_tensors="pt")
        with torch.no_grad():
            logits = model(**inputs).logits[inputs["input_ids"] == tokenizer.mask_token_id]
        wanted = logits.softmax(dim=-1).topk(5)
        assert [word["token"] for word in filled] == wanted.indices[0].tolist()
        assert [word["score"] for word in filled] == pytest.approx(wanted.values[0].tolist(), rel=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch_size", [2, 3])
def test_the_padding_of_a_batch_changes_no_word(mask_filler, tokenizer, batch_size, side):
    fill = pipeline("fill-mask", model=str(mask_filler))
    alone = [fill(line) for line in LINES]
    fill.tokenizer.padding_side = side
    together = fill(LINES, batch_size=batch_size)
    assert [*map(words_of, together)] == [*map(words_of, alone)]
    for one, other in zip(itertools.chain(*together), itertools.chain(*alone), strict=True):
        # float32 rounding over two layers.
        assert one["score"] == pytest.approx(other["score"], rel=1e-4)


def test_several_masks_of_a_line_are_each_filled(mask_filler):
    filled = pipeline("fill-mask", model=str(mask_filler))("[MASK] is the [MASK] of Germany.", top_k=3)
    assert [len(words) for words in filled] == [3, 3]


def test_a_published_folder_fills_masks(published, tokenizer):
    _, at = published(num_landmarks=16)
    model = EncoderForMaskedLM.from_pretrained(at)
    filled = pipeline("fill-mask", model=model, tokenizer=tokenizer)(LINES, batch_size=3)
    assert [len(words) for words in filled] == [5, 5, 5]
