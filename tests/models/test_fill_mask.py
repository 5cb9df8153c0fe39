"""Words for masks: what transformers' pipeline gives, for many lines in little memory, and one line per mistake."""

import io
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import pipeline

from nystrom.cli.main import main
from nystrom.models import EncoderConfig, EncoderForMaskedLM
from nystrom.models.fill_mask import MaskFiller, fill_mask

LINE = "Paris is the [MASK] of France."


@pytest.fixture(scope="session")
def folder(tmp_path_factory, tokenizer):
    """A small masked LM that was trained on nothing, with its tokenizer."""
    torch.manual_seed(0)
    at = tmp_path_factory.mktemp("fill") / "model"
    config = EncoderConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, conv_kernel_size=5, initializer_range=0.3, pad_token_id=tokenizer.pad_token_id,
        attention_options={"num_landmarks": 5},
    )  # fmt: skip
    EncoderForMaskedLM(config).save_pretrained(at)
    tokenizer.save_pretrained(at)
    return at


def test_the_pipeline_of_transformers_fills_masks_with_the_model(folder, tokenizer):
    by_folder = pipeline("fill-mask", model=str(folder))
    assert type(by_folder.model) is EncoderForMaskedLM
    by_object = pipeline("fill-mask", model=EncoderForMaskedLM.from_pretrained(folder), tokenizer=tokenizer)
    assert [x["token"] for x in by_folder(LINE)] == [x["token"] for x in by_object(LINE)]


@pytest.mark.parametrize("line", [LINE, "[MASK] is the [MASK] of Germany."])
def test_words_and_probabilities_are_those_of_the_pipeline(folder, line):
    theirs = pipeline("fill-mask", model=str(folder))(line, top_k=4)
    theirs = theirs if isinstance(theirs[0], list) else [theirs]
    ours = fill_mask(line, model=folder, top_k=4, device="cpu")
    assert [(x.mask, x.rank) for x in ours] == [(i + 1, j + 1) for i in range(len(theirs)) for j in range(4)]
    for mine, other in zip(ours, itertools.chain(*theirs), strict=True):
        assert (mine.token_id, mine.token) == (other["token"], other["token_str"].strip())
        # float32 rounding: the vocabulary is scored at the masks alone here.
        assert mine.probability == pytest.approx(other["score"], rel=1e-4)


def test_a_word_stands_in_place_of_its_mask(folder):
    one, two = fill_mask("[MASK] is the [MASK] of Germany.", model=folder, top_k=1, device="cpu")
    assert one.text == f"{one.token} is the [MASK] of Germany."
    assert two.text == f"[MASK] is the {two.token} of Germany."


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_the_batch_changes_nothing(folder, batch_size):
    lines = [LINE, "", "a [MASK] hides a word , and so does every other [MASK] in this long line .", "[MASK]", "  \n"]
    alone = [fill_mask(line, model=folder, device="cpu") for line in lines]
    together = fill_mask(lines, model=folder, batch_size=batch_size, device="cpu")
    assert [x.line for x in together] == [1] * 5 + [3] * 10 + [4] * 5
    for mine, other in zip(together, itertools.chain(*alone), strict=True):
        assert (mine.mask, mine.rank, mine.token_id, mine.text) == (other.mask, other.rank, other.token_id, other.text)
        assert mine.probability == pytest.approx(other.probability, rel=1e-4)


def test_lines_are_read_as_they_are_needed(folder):
    read = itertools.count(1)
    endless = (LINE for _ in iter(lambda: next(read), None))
    filled = MaskFiller(folder, batch_size=4, top_k=1, device="cpu").fill(endless)
    assert [x.line for x in itertools.islice(filled, 6)] == [1, 2, 3, 4, 5, 6]
    assert next(read) == 9


def test_the_model_stays_as_it_was(folder, tokenizer):
    model = EncoderForMaskedLM.from_pretrained(folder).train()
    assert fill_mask(LINE, model=model, tokenizer=tokenizer) == fill_mask(LINE, model=model, tokenizer=tokenizer)
    assert model.training


def test_a_published_folder_fills_masks(published, tokenizer):
    _, at = published(num_landmarks=16)
    tokenizer.save_pretrained(at)
    assert len(fill_mask([LINE, "a [MASK]"], model=at, device="cpu")) == 10


def test_lines_before_a_mistake_are_filled(folder):
    for wrong, says in (
        ("no mask", r"line 3 holds no \[MASK\]: 'no mask'"),
        ("[MASK] a" * 40, "line 3 holds .* tokens"),
    ):
        filled = MaskFiller(folder, batch_size=16, top_k=1, device="cpu").fill([LINE, LINE, wrong, LINE])
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
def test_arguments_that_do_not_fit_are_refused_by_name(folder, wrong, says):
    with pytest.raises(ValueError, match=says):
        fill_mask(**({"texts": LINE, "model": folder} | wrong))


def test_a_tokenizer_that_does_not_belong_is_refused(folder, tokenizer, tmp_path):
    small = EncoderForMaskedLM(
        EncoderConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    )
    with pytest.raises(ValueError, match="the tokenizer has 30 tokens but the model 9"):
        fill_mask(LINE, model=small, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="tokenizer is None, but model is no folder"):
        fill_mask(LINE, model=small)
    EncoderForMaskedLM.from_pretrained(folder).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings = {name: value for name, value in settings.items() if name != "mask_token"}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="the tokenizer has no mask token"):
        fill_mask(LINE, model=tmp_path)


def run(capsys, *words):
    code = main(["fill-mask", *map(str, words), "--device", "cpu"])
    return code, *capsys.readouterr()


def test_the_command_prints_a_table_and_json(folder, capsys):
    code, out, err = run(capsys, LINE, "--model", folder, "--top-k", 3)
    expected = fill_mask(LINE, model=folder, top_k=3, device="cpu")
    assert (code, err) == (0, "")
    assert all(f"{x.probability:.2%}" in out for x in expected)
    code, out, _ = run(capsys, LINE, "--model", folder, "--top-k", 3, "--json")
    assert [json.loads(line)["token_id"] for line in out.splitlines()] == [x.token_id for x in expected]


def test_the_command_reads_a_file_and_standard_input(folder, capsys, tmp_path, monkeypatch):
    text = f"{LINE}\n\nBerlin [MASK]\n"
    (tmp_path / "lines.txt").write_text(text)
    code, by_file, _ = run(capsys, "--file", tmp_path / "lines.txt", "--model", folder, "--json", "--batch-size", 2)
    assert code == 0
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    code, by_input, _ = run(capsys, "--file", "-", "--model", folder, "--json", "--batch-size", 2)
    assert code == 0
    assert by_input == by_file
    assert [json.loads(line)["line"] for line in by_file.splitlines()] == [1] * 5 + [3] * 5


def test_the_bar_goes_to_stderr_and_only_for_lines_of_a_file(folder, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    (tmp_path / "lines.txt").write_text(f"{LINE}\n" * 3)
    code, out, err = run(capsys, "--file", tmp_path / "lines.txt", "--model", folder, "--json")
    assert code == 0
    assert "3/3" in err
    assert "3/3" not in out
    assert "/1" not in run(capsys, LINE, "--model", folder)[2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "takes either a text or --file"),
        ([LINE, "--file", "-"], "takes either a text or --file"),
        (["--file", "nowhere.txt"], "file is nowhere.txt, which is not a file"),
        (["no mask"], "line 1 holds no [MASK]: 'no mask'"),
        ([LINE, "--top-k", "0"], "top_k is 0"),
    ],
)
def test_a_mistake_ends_with_one_line_and_code_2(folder, capsys, words, says):
    code, out, err = run(capsys, *words, "--model", folder)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


def test_a_line_without_a_mask_stops_a_file_before_the_first_answer(folder, capsys, tmp_path):
    (tmp_path / "lines.txt").write_text(f"{LINE}\nno mask\n")
    code, out, err = run(capsys, "--file", tmp_path / "lines.txt", "--model", folder)
    assert (code, out) == (2, "")
    assert "line 2 holds no [MASK]: 'no mask'" in err


def test_a_file_that_is_no_text_is_refused(folder, capsys, tmp_path):
    (tmp_path / "lines.txt").write_bytes(b"\xff\xfe[MASK]")
    code, _, err = run(capsys, "--file", tmp_path / "lines.txt", "--model", folder)
    assert code == 2
    assert "lines.txt is no UTF-8 text" in err


@pytest.mark.slow
def test_memory_does_not_grow_with_the_lines(folder, tmp_path):
    peaks = []
    for count in (2_000, 20_000):
        (tmp_path / "lines.txt").write_text(f"{LINE}\n" * count)
        code = (
            "import resource, sys; from nystrom.cli.main import main; main(sys.argv[1:]);"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
        )
        words = [
            "fill-mask",
            "--file",
            str(tmp_path / "lines.txt"),
            "--model",
            str(folder),
            "--json",
            "--device",
            "cpu",
        ]
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, env=os.environ
        )
        peaks.append(int(done.stderr.split()[-1]))
    # In KiB; the interpreter's own heap varies by a few MiB.
    assert peaks[1] < peaks[0] + 20 * 1024
