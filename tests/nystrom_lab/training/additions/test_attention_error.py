"""`--track-error` puts the error of attention into the curves, and changes nothing else."""

import pytest
from torch.testing import assert_close

from nystrom.attention.tracked_error import tracked_errors
from nystrom_lab.cli.main import main
from nystrom_lab.training.additions.attention_error import error_quantities, restart_errors, take_errors
from nystrom_lab.training.options import TrainOptions
from nystrom_lab.training.run_settings import settle


def of_error(points):
    return {quantity: {} for _, quantity, _ in points if quantity.startswith("attention error")} | {
        name: {step: value for step, quantity, value in points if quantity == name}
        for name in {quantity for _, quantity, _ in points if quantity.startswith("attention error")}
    }


@pytest.fixture(scope="module")
def tracked(tmp_path_factory, small_run):
    return small_run(tmp_path_factory.mktemp("tracked") / "run", track_error=True, steps=12)


def test_each_point_has_the_error_and_the_weights_are_those_without(tracked, whole, weights, curves, capsys):
    found = of_error(curves(tracked))
    assert found.keys() == {"attention error", "attention error of layer 0", "attention error of layer 1"}
    assert list(found["attention error"]) == list(range(1, 13))
    for step, mean in found["attention error"].items():
        layers = [values[step] for name, values in found.items() if "layer" in name]
        assert mean == pytest.approx(sum(layers) / 2)
        assert 0 < mean < 10
    assert_close(weights(tracked), weights(whole), rtol=0, atol=0)
    assert not of_error(curves(whole))
    assert '"track_error"' not in (tracked / "best" / "config.json").read_text()
    assert (tracked / "curves.png").is_file()


def test_a_resumed_run_has_the_curves_of_one_that_was_not(
    tracked, small_run, tmp_path, curves, interrupt_at, monkeypatch
):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt_at(patch, 8)
        with pytest.raises(KeyboardInterrupt):
            small_run(run, track_error=True)
    small_run(run, track_error=True, resume=True)
    assert of_error(curves(run)) == of_error(curves(tracked))


def test_the_option_of_the_command_leads_to_the_curve(data, tmp_path, curves, capsys):
    run = tmp_path / "run"
    main(
        f"train listops --preset demo --data {data} --to {run} --steps 2 --warmup-steps 0 --batch-size 8 --log-every 1 "
        "--device cpu --attention nystrom --options.num-landmarks 8 --track-error".split()
    )
    assert len(of_error(curves(run))["attention error"]) == 2
    assert "attention error 0." in capsys.readouterr().out
    assert "--track-error" in (run / "rows.csv").read_text()


def test_points_are_of_the_steps_since_the_last_one():
    import torch

    from nystrom.models import EncoderModel

    settings = settle(
        TrainOptions(
            "listops",
            device="cpu",
            precision="float32",
            track_error=True,
            attention="nystrom",
            options={"num_landmarks": 4},
            preset="demo",
        )
    )
    torch.manual_seed(0)
    model = EncoderModel(settings.encoder_config()).train()
    assert list(error_quantities(model).values())[:2] == ["attention error", "attention error of layer 0"]
    assert take_errors(model) == {}
    model(torch.randint(1, 9, (2, 40)))
    assert all(name.endswith("attention.self") for name in tracked_errors(model))
    assert set(take_errors(model)) == set(error_quantities(model))
    assert take_errors(model) == {}
    restart_errors(model, 7)
    assert all(error.isnan().all() for error in tracked_errors(model).values())
