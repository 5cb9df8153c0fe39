import pytest
import torch

from nystrom_lab.measure.rows import new_row
from nystrom_lab.studies.reproduce.study import Setting
from nystrom_lab.studies.stability.arena import new_model, random_batches
from nystrom_lab.studies.stability.spectra import STUDIES, output_singular_values
from nystrom_lab.training.train import train

STUDY = STUDIES["skyformer-appendix-b"]


def test_singular_values_are_those_of_the_second_layers_attention_over_real_tokens(listops, tmp_path):
    model = new_model(listops, "softmax", seed=0)
    (batch,) = random_batches(listops, listops.open("test", tmp_path), batch=5, count=1, seed=0)
    values = output_singular_values(model, batch)
    assert values.shape[0] == 5
    layer = model.nystromformer.encoder.layer[1].attention
    for ids, keep, found in zip(batch["input_ids"], batch["attention_mask"], values, strict=True):
        with torch.no_grad():
            # Alone, without padding.
            states = model.nystromformer(ids[None, keep], output_hidden_states=True, return_dict=True).hidden_states[1]
            x = layer.output.before(states)
            q, k, v = (
                part(x).view(-1, 2, 32).transpose(0, 1) for part in (layer.self.query, layer.self.key, layer.self.value)
            )
            output = ((q @ k.mT / 32**0.5).softmax(dim=-1) @ v).transpose(0, 1).flatten(1)
        wanted = torch.linalg.svdvals(output.double())
        # Rounding of float32 attention, against the largest singular value.
        torch.testing.assert_close(found[: len(wanted)], wanted, rtol=0, atol=1e-5 * wanted[0].item())


def errors(task, value, *, far=0.0, right=0.9):
    """Rows of a trained model, and what the one with random weights has right."""
    shared = {"study": "", "method": "softmax", "unit": "", "device": "cpu"}
    facts = {"task": task, "weights": "trained", "b": 100}
    return [
        new_row(quantity="relative error at rank r", value=value, low=value - far, high=value + far, repeats=100, m=16,
                facts=facts, **shared),
        new_row(quantity="test accuracy", value=right, facts=facts, **shared),
        new_row(quantity="test accuracy", value=0.2, facts=facts | {"weights": "initialised"}, **shared),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tasks", "named", "words"),
    [
        ({"text": 0.01, "listops": 0.02, "retrieval": 0.04, "pathfinder": 0.03}, {}, ["agrees", "agrees"]),
        (
            {"text": 0.01, "listops": 0.2, "retrieval": 0.04, "pathfinder": 0.03},
            {},
            ["does not agree", "does not agree"],
        ),
        # Two standard errors are 0.3 of a distance of a quartile from the mean.
        ({"text": 0.09, "listops": 0.09, "retrieval": 0.11, "pathfinder": 0.11}, {"far": 0.05}, ["cannot tell"] * 2),
        ({"listops": 0.09}, {}, ["agrees", "cannot tell"]),
        ({"listops": 0.11}, {}, ["does not agree", "cannot tell"]),
        # No more samples right than with random weights.
        ({"text": 0.01, "listops": 0.2, "retrieval": 0.04, "pathfinder": 0.03}, {"right": 0.25}, ["cannot tell"] * 2),
    ],
)
def test_each_claim_can_agree_fail_and_be_undecided(tasks, named, words):
    rows = [row for task, value in tasks.items() for row in errors(task, value, **named)]
    assert [verdict.word for verdict in STUDY.verdicts(rows)] == words


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data):
    """Two finished runs, of which one has softmax attention."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("softmax", "linear"):
        train(
            "listops", attention=method, data=data, preset="demo", steps=2, batch_size=4, evaluate_every=2, log_every=2,
            device="cpu", to=folder / f"listops-{method}-demo-seed0",
        )  # fmt: skip
    return folder


def test_trained_runs_are_measured_beside_initialised_weights(runs, data, tmp_path):
    plan = STUDY.plan(Setting(runs=runs))
    assert [part.name for part in plan.parts] == ["listops"]
    assert plan.setting["runs"] == "listops-softmax-demo-seed0"
    assert plan.differs.startswith("without ")
    assert "; pooling of real tokens alone, " in plan.differs
    rows = list(plan.parts[0].measure(tmp_path))
    trained = [row for row in rows if "weights=trained" in row.words and row.quantity.startswith("singular")]
    # No sequence of the batch has 64 tokens.
    assert [row.m for row in trained] == list(range(1, len(trained) + 1))
    assert 30 < len(trained) < 40
    values = [row.value for row in trained]
    assert values[0] == 1
    assert values == sorted(values, reverse=True)
    others = [row.value for row in rows if "weights=initialised" in row.words and row.quantity.startswith("singular")]
    assert others != values
    tables = STUDY.tables(rows)
    assert [line[:2] for line in tables[0].lines] == [["listops", "trained"], ["listops", "initialised"]]
    assert len(STUDY.figures(rows, tmp_path)[""].axes) == 1


def test_what_is_not_there_ends_before_any_work(runs, tmp_path):
    for setting, says in (
        (Setting(size="paper"), "needs trained models"),
        (Setting(size="paper", runs=runs), "holds no finished run with softmax"),
        (Setting(runs=tmp_path), "holds no finished run with softmax"),
        (Setting(runs=runs, data=tmp_path), "which is missing"),
    ):
        with pytest.raises(ValueError, match=says) as error:
            STUDY.plan(setting)
        assert "\n" not in str(error.value)
