"""The instability score: against a computation by hand, and its rules both ways."""

from dataclasses import replace

import pytest
import torch

from nystrom_lab.measure.rows import Row, read_rows
from nystrom_papers.report.printed import SKYFORMER_APPENDIX_F
from nystrom_papers.studies.reproduce.run import check_study, run_study
from nystrom_papers.studies.reproduce.study import Setting
from nystrom_papers.studies.stability.arena import new_model, random_batches
from nystrom_papers.studies.stability.instability import METHODS, STUDIES, instability_scores

STUDY = STUDIES["skyformer-appendix-f"]


@pytest.fixture
def printed():
    """The paper's numbers as rows of two seeds that differ by a hundredth."""
    return [
        Row(study="", quantity="ratio to self-attention", method=m, value=v + shift, unit="",
                device="cpu", facts={"task": task, "b": 1, "steps": 20}, seed=seed)
        for m, tasks in SKYFORMER_APPENDIX_F.items()
        for task, v in tasks.items()
        for seed, shift in enumerate((-0.005, 0.005))
    ]  # fmt: skip


def test_the_first_score_is_that_of_a_step_by_hand(listops, tmp_path):
    split = listops.open("train", tmp_path)
    (batch,) = random_batches(listops, split, batch=6, count=1, seed=0)
    model, by_hand = (new_model(listops, "nystrom", seed=0) for _ in range(2))
    score = instability_scores(model, [batch], task="listops", seed=5)
    keep = batch["attention_mask"]

    def states():
        with torch.no_grad():
            return by_hand.eval()(**batch, output_hidden_states=True, return_dict=True).hidden_states[-1][keep]

    before, weights = states(), torch.nn.utils.parameters_to_vector(by_hand.nystromformer.parameters()).detach().clone()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        by_hand.train()(**batch).loss.backward()
    # Adam's first step moves each weight by the rate times g / (|g| + eps), g cut to 1; the rate begins at a 25th.
    with torch.no_grad():
        for weight in by_hand.parameters():
            gradient = weight.grad.clamp(-1, 1)
            weight -= 1e-4 / 25 * gradient / (gradient.abs() + 1e-6)
    moved = torch.nn.utils.parameters_to_vector(by_hand.nystromformer.parameters()).detach() - weights
    wanted = (states() - before).double().square().sum() / moved.double().square().sum()
    # A weight of 0.07 moves by 4e-6, of which float32 keeps three figures.
    assert score[0].item() == pytest.approx(wanted.item(), rel=0.02)


@pytest.mark.parametrize("method", METHODS)
def test_padding_counts_for_nothing_and_a_pair_is_two_sequences(method, documents, tmp_path):
    split = documents.open("train", tmp_path)
    (batch,) = random_batches(documents, split, batch=4, count=1, seed=0)
    longer = batch | {name: torch.nn.functional.pad(batch[name], (0, 7)) for name in ("input_ids", "attention_mask")}
    # Without dropout, whose draws depend on the padded length.
    scores = []
    for each in (batch, longer):
        model = new_model(documents, method, seed=0)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        scores.append(instability_scores(model, [each], task="retrieval", seed=0))
    one, other = scores
    assert one.item() == pytest.approx(other.item(), rel=0.05)
    assert one.item() > 0


def test_the_printed_ratios_agree_with_their_claims_and_others_do_not(printed):
    def words(rows):
        return [verdict.word for verdict in STUDY.verdicts(rows)]

    assert words(printed) == ["agrees", "agrees"]
    table = STUDY.tables(printed)[0]
    assert table.lines[0][:3] == ["nystrom", "1.03 / 1.03", "1.01 / 1.01"]
    worse = [replace(r, value=1.2) if r.method == "skyformer" and "image" in r.words else r for r in printed]
    assert words(worse) == ["does not agree", "agrees"]
    for value in (0.89, 1.11):
        far = [replace(r, value=value) if r.method == "nystrom" and "text" in r.words else r for r in printed]
        assert words(far) == ["agrees", "does not agree"]


def test_seeds_that_differ_widely_and_a_single_one_cannot_tell(printed):
    apart = [replace(row, value=row.value + (0.5 if row.seed else -0.5)) for row in printed]
    for rows in (apart, [row for row in printed if row.seed == 0], []):
        assert [verdict.agrees for verdict in STUDY.verdicts(rows)] == [None, None]


@pytest.mark.slow
def test_a_seed_is_measured_and_drawn(data, tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "listops").symlink_to(data)
    job = check_study("skyformer-appendix-f", Setting(data=folder), tmp_path)
    assert [part.name for part in job.plan.parts][:3] == [f"listops-seed={seed}" for seed in range(3)]
    assert "pathfinder (drawn" in job.plan.setting["tasks"]
    # So that a folder with the rows of fewer methods is refused.
    assert job.plan.setting["methods"] == " ".join(METHODS)
    assert "text, retrieval, image" in job.plan.differs
    assert "Skyformer's landmarks drawn by segments" in job.plan.differs
    summary = run_study(job._replace(plan=job.plan._replace(parts=job.plan.parts[:2])), lambda line: None)
    rows = read_rows(job.folder / "rows.csv")
    assert {row.value for row in rows if row.method == "softmax" and row.quantity.startswith("ratio")} == {1.0}
    assert summary.figures == ["skyformer-appendix-f.png"]


def test_the_papers_size_needs_every_task(tmp_path):
    with pytest.raises(ValueError, match="needs text, retrieval, image in --data") as error:
        STUDY.plan(Setting(size="paper"))
    assert "\n" not in str(error.value)
