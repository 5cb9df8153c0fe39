"""The preset of the Long Range Arena's own code, and the design of the papers' authors."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import get_inverse_sqrt_schedule

from nystrom.models.heads.pairs import EncoderForPairClassification
from nystrom_lab.measure.rows import read_rows
from nystrom_lab.training.presets import find_preset
from nystrom_lab.training.run_settings import Settings, train_options
from nystrom_lab.training.tasks import find_task
from nystrom_papers.report.lra.runs import line_of

TASKS = ("listops", "text", "retrieval", "image", "pathfinder")


def config_of(task, **changes):
    settings = Settings.resolve(train_options(task, device="cpu", attention="softmax", preset="official", **changes))
    return settings.encoder_config()


@pytest.mark.parametrize(
    ("task", "sizes", "training"),
    [
        ("listops", (512, 8, 4, 1_024, None), (32, 5_000, "rsqrt", 0.1)),
        ("text", (256, 4, 4, 1_024, None), (32, 20_000, "rsqrt", 0.1)),
        ("retrieval", (128, 4, 4, 512, None), (32, 5_000, "rsqrt", 0.1)),
        ("image", (128, 8, 1, 128, 64), (256, 200 * 175, "cosine", 0.0)),
        ("pathfinder", (128, 4, 1, 128, 64), (512, 200 * 312, "cosine", 0.0)),
    ],
)
def test_it_has_the_sizes_and_the_training_of_that_code(task, sizes, training):
    preset, config = find_preset(task, "official"), config_of(task)
    found = (config.hidden_size, config.num_attention_heads, config.num_hidden_layers, config.intermediate_size)
    assert (*found, config.attention_size) == sizes
    assert (preset.batch_size, preset.steps, preset.schedule, preset.weight_decay) == training
    assert (config.pooling, config.design, config.norm) == (
        *("mean" if task == "pathfinder" else "cls", "official"), "pre",
    )  # fmt: skip
    assert config.max_position_embeddings == {"listops": 2_000, "text": 1_000, "retrieval": 4_000}.get(task, 1_024)


@pytest.mark.parametrize("task", TASKS)
def test_it_has_the_parameters_of_that_code_and_biases_segments_and_two_rows_more(task):
    config = config_of(task)
    w, f, c = config.hidden_size, config.intermediate_size, config.num_labels or 0
    a = config.attention_size or w
    cls = int(config.pooling == "cls")
    theirs = (config.vocab_size + config.max_position_embeddings + 2 * cls) * w + 2 * w
    theirs += config.num_hidden_layers * (4 * w * a + 2 * w * f + f + w + 4 * w)
    theirs += (4 * w if task == "retrieval" else w) * f + f + f * c + c
    ours = config.num_hidden_layers * (3 * a + w) + w + 2 * w
    with torch.device("meta"):
        model = find_task(task).model(config)
    assert isinstance(model, EncoderForPairClassification) == (task == "retrieval")
    assert sum(weight.numel() for weight in model.parameters()) == theirs + ours


@pytest.mark.parametrize(("task", "warmup"), [("listops", 1_000), ("text", 8_000), ("retrieval", 8_000)])
def test_the_rate_is_that_of_its_factors(task, warmup):
    preset = find_preset(task, "official")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=preset.learning_rate)
    factor = get_inverse_sqrt_schedule(optimizer, preset.warmup_steps).lr_lambdas[0]
    for step in (1, 500, 999, 1_000, 2_500, 4_999):
        wanted = 0.05 * min(1, step / warmup) * max(step, warmup) ** -0.5
        assert preset.learning_rate * factor(step) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.long
def test_a_model_of_it_is_trained_and_pretrained(small_run, tmp_path):
    short = {"preset": "official", "attention": "softmax", "options": None, "steps": 2, "warmup_steps": 1}
    short |= {"evaluate_every": 2, "batch_size": 4}
    run = small_run(tmp_path / "run", **short)
    config = json.loads((run / "best" / "config.json").read_text())
    assert (config["pooling"], config["design"], config["hidden_size"]) == ("cls", "official", 512)
    first = small_run(tmp_path / "first", mask_share=0.1, **short)
    again = small_run(tmp_path / "again", model=first / "best", **(short | {"preset": None, "attention": None}))
    assert json.loads((again / "run.json").read_text())["settings"]["design"] == "official"


@pytest.mark.parametrize(("preset", "frozen"), [("nystromformer", False), ("skyformer", True)])
def test_linformers_projections_are_trained_as_in_each_papers_code(small_run, tmp_path, preset, frozen):
    changes = {"preset": preset, "attention": "linformer", "steps": 3, "warmup_steps": 0}
    changes |= {"options": {"num_features": 4, "max_length": 2_000}, "evaluate_every": 1, "clip_norm": 0.5}
    run = small_run(tmp_path / "run", **changes)
    early, late = (load_file(run / f"checkpoint-{step}" / "model.safetensors") for step in (2, 3))
    found = {name for name in late if ".method." in name}
    assert len(found) == (2 if frozen else 1)
    assert {torch.equal(late[name], early[name]) for name in found} == {frozen}
    name = "nystromformer.encoder.layer.0.output.dense.weight"
    assert not torch.equal(late[name], early[name])
    rows = read_rows(run / "rows.csv")
    assert {row.fact("projections") for row in rows} == {"frozen" if frozen else "trained"}
    assert {line_of(row).preset for row in rows} == {f"{preset}, batch_size=8, clip_norm=0.5"}
    # A run from before the presets told the two codes apart cannot go on with other projections.
    path = run / "run.json"
    content = json.loads(path.read_text())
    del content["settings"]["options"]["frozen"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"options is .*'frozen': {frozen}.* but was"):
        small_run(run, resume=True, **changes)
