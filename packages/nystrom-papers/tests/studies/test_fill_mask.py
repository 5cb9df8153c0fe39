"""The sentence of the Hugging Face post."""

from dataclasses import replace

import pytest
from transformers import BertConfig, pipeline

from nystrom.models import EncoderForMaskedLM
from nystrom.models.files.model_fingerprint import model_fingerprint
from nystrom_lab.cli.main import main
from nystrom_lab.measure.rows import Row, read_rows
from nystrom_papers.studies.fill_mask import PRINTED, SENTENCE, STUDIES
from nystrom_papers.studies.reproduce.run import check_study, run_study
from nystrom_papers.studies.reproduce.study import Setting

BLOG = STUDIES["blog"]


@pytest.fixture
def rows():
    """The numbers that the post printed."""
    common = {"study": "blog", "quantity": "score of a word", "method": "nystrom", "unit": "", "device": "cpu"}
    return [
        Row(value=value, facts={"rank": rank, "word": word}, **common)
        for rank, (word, value) in enumerate(PRINTED.items(), start=1)
    ]


def test_a_published_model_fills_the_sentence_and_its_words_are_those_of_the_library(published, tokenizer, tmp_path):
    _, folder = published(num_landmarks=16, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    job = check_study("blog", Setting(model=folder), tmp_path)
    summary = run_study(job, lambda line: None)
    expected = pipeline("fill-mask", model=EncoderForMaskedLM.from_pretrained(folder), tokenizer=tokenizer)(SENTENCE)
    assert [line[3] for line in summary.tables[0].lines] == [filling["token_str"] for filling in expected]
    assert [line[4] for line in summary.tables[0].lines] == [f"{filling['score']:.4f}" for filling in expected]
    assert [line[1] for line in summary.tables[0].lines] == list(PRINTED)
    assert summary.verdicts[0].agrees is False
    assert (job.folder / "blog.png").is_file()
    fingerprints = {row.fact("fingerprint") for row in read_rows(job.folder / "rows.csv")}
    assert fingerprints == {model_fingerprint(folder)}


def test_the_posts_own_words_and_scores_agree_and_others_do_not(rows):
    def word(rows):
        return BLOG.verdicts(rows)[0].word

    assert word(rows) == word(rows[::-1]) == "agrees"
    assert word([replace(rows[0], value=rows[0].value + 0.0004), *rows[1:]]) == "agrees"
    assert word([replace(rows[0], value=rows[0].value + 0.0006), *rows[1:]]) == "does not agree"
    swapped = [row.with_facts(word=row.facts["word"].replace("name", "town")) for row in rows]
    assert word(swapped) == "does not agree"
    assert word(rows[:4]) == word([]) == "cannot tell"


def test_without_a_model_that_fills_masks_one_line_ends_it(published, tokenizer, tmp_path, capsys):
    assert main(["reproduce", "blog", "--to", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert "uw-madison/nystromformer-512" in err
    assert err.count("\n") == 1
    _, classifier = published("ForSequenceClassification")
    bert = tmp_path / "bert"
    BertConfig().save_pretrained(bert)
    for folder, says in (
        (tmp_path / "none", "is not a folder"),
        (classifier, "ForSequenceClassification"),
        (bert, "bert"),
    ):
        with pytest.raises(ValueError, match=says) as error:
            BLOG.plan(Setting(model=folder))
        assert "\n" not in str(error.value)
    _, bare = published()
    with pytest.raises(ValueError, match="tokenizer"):
        BLOG.plan(Setting(model=bare))
