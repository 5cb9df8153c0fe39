"""Samples that are cut over processes: the run of one process, and what is refused before it starts."""

import pytest
import torch
from torch.testing import assert_close

from nystrom_lab.measure.rows import read_rows
from nystrom_lab.training.batches import collate, collate_whole
from nystrom_lab.training.ranks import _cut


@pytest.fixture
def words(demo_words, data):
    return ["train", "listops", *demo_words, "--data", data, "--context-parallel", "2"]


@pytest.mark.long
def test_two_processes_that_share_each_sample_give_the_run_of_one(small_run, torchrun, same_run, words, tmp_path):
    changes = {"augment": True, "label_smoothing": 0.1}
    one = small_run(tmp_path / "one", dropout=0.0, **changes)
    flags = ["--augment", "True", "--label-smoothing", "0.1"]
    done = torchrun(2, *words, *flags, "--to", tmp_path / "two")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("test accuracy") == 1
    same_run(tmp_path / "two", one)
    command = read_rows(tmp_path / "two" / "rows.csv")[0].command
    assert command.startswith("torchrun --nproc-per-node 2 -m nystrom_lab train listops")
    assert "--context-parallel 2" in command


@pytest.mark.slow
def test_two_groups_of_two_processes_give_the_run_of_one_and_go_on_with_it(
    small_run, torchrun, same_run, words, tmp_path
):
    one, run = small_run(tmp_path / "one", dropout=0.0, accumulation=2), tmp_path / "four"
    words = [*words, "--to", run, "--accumulation", "2"]
    done = torchrun(4, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    same_run(run, one)
    (run / "checkpoint-12" / "complete.json").unlink()
    (run / "rows.csv").unlink()
    done = torchrun(4, *words, "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Continuing after step 9." in done.stdout
    same_run(run, one)


def test_every_token_is_on_one_rank():
    samples = [{"input_ids": torch.arange(1, n).numpy(), "labels": n % 3} for n in (4, 8)]
    whole, pieces = collate(samples), [_cut(collate, rank, 3, samples) for rank in range(3)]
    assert [piece["input_ids"].shape for piece in pieces] == [(2, 3), (2, 2), (2, 2)]
    for name in ("input_ids", "attention_mask"):
        assert_close(torch.cat([piece[name] for piece in pieces], dim=1), whole[name])
    # A class for each sample, and one number of them as of tokens.
    assert all(piece["labels"].tolist() == [1, 2] for piece in pieces)
    square = [{"input_ids": torch.arange(2).numpy(), "labels": 1} for _ in range(2)]
    assert _cut(collate_whole, 1, 2, square)["labels"].tolist() == [1, 1]
    # There may be more ranks than tokens.
    assert _cut(collate_whole, 3, 4, square)["input_ids"].shape == (2, 0)


@pytest.mark.parametrize(
    ("processes", "changes", "said"),
    [
        (1, {}, "context_parallel is 2 but processes is 1; expected groups of 2: start a multiple of them"),
        (3, {}, "context_parallel is 2 but processes is 3; expected groups of 2"),
        (2, {"context_parallel": 0}, "context_parallel is 0; expected a whole number of at least 1"),
        (4, {"batch_size": 9}, "batch_size is 9 but 2 groups of 2 processes share it, each in accumulation = 1"),
        (2, {"attention": "reformer", "options": {}}, "model attends by reformer, which does not work over ranks"),
        (2, {"attention": "none", "options": {}}, "model has no attention"),
        (2, {"short_conv_kernel_size": 3}, "a ShortConvolution, which does not work over ranks"),
        (2, {"compile": True}, "compile is on and context_parallel is 2, but a graph does not exchange tokens"),
        (2, {"task": "retrieval"}, "model is a EncoderForPairClassification, which does not work over ranks"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_data_are_read(small_run, tmp_path, monkeypatch, processes, changes, said):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    (tmp_path / "no-data").mkdir()
    with pytest.raises(ValueError, match=said) as error:
        small_run(tmp_path / "run", **{"data": tmp_path / "no-data", "context_parallel": 2} | changes)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
