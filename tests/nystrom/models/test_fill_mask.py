"""Words for masks: what transformers' pipeline gives, for many lines in little memory, and one line per mistake."""

import itertools
import json

import pytest
from transformers import pipeline

from nystrom.models import EncoderConfig, EncoderForMaskedLM
from nystrom.models.fill_mask import MaskFiller, fill_mask

LINE = "Paris is the [MASK] of France."


def test_the_pipeline_of_transformers_fills_masks_with_the_model(mask_filler, tokenizer):
    by_folder = pipeline("fill-mask", model=str(mask_filler))
    assert type(by_folder.model) is EncoderForMaskedLM
    by_object = pipeline("fill-mask", model=EncoderForMaskedLM.from_pretrained(mask_filler), tokenizer=tokenizer)
    assert [x["token"] for x in by_folder(LINE)] == [x["token"] for x in by_object(LINE)]


@pytest.mark.parametrize("line", [LINE, "[MASK] is the [MASK] of Germany."])
def test_words_and_probabilities_are_those_of_the_pipeline(mask_filler, line):
    theirs = pipeline("fill-mask", model=str(mask_filler))(line, top_k=4)
    theirs = theirs if isinstance(theirs[0], list) else [theirs]
    ours = fill_mask(line, model=mask_filler, top_k=4, device="cpu")
    assert [(x.mask, x.rank) for x in ours] == [(i + 1, j + 1) for i in range(len(theirs)) for j in range(4)]
    for mine, other in zip(ours, itertools.chain(*theirs), strict=True):
        assert (mine.token_id, mine.token) == (other["token"], other["token_str"].strip())
        # float32 rounding: the vocabulary is scored at the masks alone here.
        assert mine.probability == pytest.approx(other["score"], rel=1e-4)


def test_a_word_stands_in_place_of_its_mask(mask_filler):
    one, two = fill_mask("[MASK] is the [MASK] of Germany.", model=mask_filler, top_k=1, device="cpu")
    assert one.text == f"{one.token} is the [MASK] of Germany."
    assert two.text == f"[MASK] is the {two.token} of Germany."


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_the_batch_changes_nothing(mask_filler, batch_size):
    lines = [LINE, "", "a [MASK] hides a word , and so does every other [MASK] in this long line .", "[MASK]", "  \n"]
    alone = [fill_mask(line, model=mask_filler, device="cpu") for line in lines]
    together = fill_mask(lines, model=mask_filler, batch_size=batch_size, device="cpu")
    assert [x.line for x in together] == [1] * 5 + [3] * 10 + [4] * 5
    for mine, other in zip(together, itertools.chain(*alone), strict=True):
        assert (mine.mask, mine.rank, mine.token_id, mine.text) == (other.mask, other.rank, other.token_id, other.text)
        assert mine.probability == pytest.approx(other.probability, rel=1e-4)


def test_lines_are_read_as_they_are_needed(mask_filler):
    read = itertools.count(1)
    endless = (LINE for _ in iter(lambda: next(read), None))
    filled = MaskFiller(mask_filler, batch_size=4, top_k=1, device="cpu").fill(endless)
    assert [x.line for x in itertools.islice(filled, 6)] == [1, 2, 3, 4, 5, 6]
    assert next(read) == 9


def test_the_model_stays_as_it_was(mask_filler, tokenizer):
    model = EncoderForMaskedLM.from_pretrained(mask_filler).train()
    assert fill_mask(LINE, model=model, tokenizer=tokenizer) == fill_mask(LINE, model=model, tokenizer=tokenizer)
    assert model.training


def test_a_published_folder_fills_masks(published, tokenizer):
    _, at = published(num_landmarks=16)
    tokenizer.save_pretrained(at)
    assert len(fill_mask([LINE, "a [MASK]"], model=at, device="cpu")) == 10


def test_lines_before_a_mistake_are_filled(mask_filler):
    for wrong, says in (
        ("no mask", r"line 3 holds no \[MASK\]: 'no mask'"),
        ("[MASK] a" * 40, "line 3 holds .* tokens"),
    ):
        filled = MaskFiller(mask_filler, batch_size=16, top_k=1, device="cpu").fill([LINE, LINE, wrong, LINE])
        assert [next(filled).line, next(filled).line] == [1, 2]
        with pytest.raises(ValueError, match=says):
            next(filled)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 10**6}, "top_k is 1000000 but the model has 30 tokens"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"texts": "no mask"}, r"line 1 holds no \[MASK\]"),
        ({"model": "nowhere"}, "model is 'nowhere'"),
    ],
)
@pytest.mark.refuses
def test_arguments_that_do_not_fit_are_refused_by_name(mask_filler, wrong, says):
    with pytest.raises(ValueError, match=says):
        fill_mask(**({"texts": LINE, "model": mask_filler} | wrong))


def test_a_tokenizer_that_does_not_belong_is_refused(mask_filler, tokenizer, tmp_path):
    small = EncoderForMaskedLM(
        EncoderConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    )
    with pytest.raises(ValueError, match="the tokenizer has 30 tokens but the model 9"):
        fill_mask(LINE, model=small, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="tokenizer is None, but model is not a folder"):
        fill_mask(LINE, model=small)
    EncoderForMaskedLM.from_pretrained(mask_filler).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings = {name: value for name, value in settings.items() if name != "mask_token"}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="the tokenizer has no mask token"):
        fill_mask(LINE, model=tmp_path)
