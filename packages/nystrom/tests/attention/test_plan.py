"""Plans of a method for each layer, and their files."""

import json

import pytest

from nystrom.attention.plan import AttentionPlan, LayerChoice, plan_of_options, read_plan

LAYERS = (
    LayerChoice("softmax", {}),
    LayerChoice("nystrom", {"num_landmarks": 32}),
    LayerChoice("nystrom", {"num_landmarks": 32}),
    LayerChoice("nystrom", {}),
)


HEAD = {"format": "nystrom attention plan", "measurements": {}}


def test_a_plan_comes_back_from_its_file(tmp_path):
    plan = AttentionPlan(LAYERS, {"error": 0.04})
    plan.write(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    assert plan_of_options(plan.options).layers == LAYERS


def test_a_file_of_version_0_3_is_read(tmp_path):
    path, layers = tmp_path / "plan.json", [{"method": "nystrom", "options": {"num_landmarks": 32}}]
    path.write_text(json.dumps({"format": "nystrom attention plan", "layers": layers, "found": {"error": 0.04}}))
    assert read_plan(path) == AttentionPlan(LAYERS[1:2], {"error": 0.04})


def test_a_plan_is_said_by_method():
    assert str(AttentionPlan(LAYERS)) == "softmax in layer 0; nystrom-32 in layers 1-2; nystrom-64 in layer 3"


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([], "layers is empty"),
        ([LayerChoice("nystrm", {})], "method of layer 0"),
        ([LayerChoice("softmax", {}), LayerChoice("nystrom", {"landmark": 3})], "option of nystrom"),
        ([LayerChoice("nystrom", {"num_landmarks": 0})], "num_landmarks is 0"),
    ],
)
def test_a_wrong_plan_raises(layers, says):
    with pytest.raises(ValueError, match=says):
        AttentionPlan(tuple(layers))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is missing: nystrom inspect --budget writes a plan"),
        ("{", "not valid JSON"),
        ("[]", "holds a list; expected a JSON object"),
        (json.dumps({"layers": []}), "not an attention plan"),
        (
            json.dumps({"format": "nystrom attention plan", "measurements": {}, "layers": [{"method": "softmax"}]}),
            "one per layer",
        ),
        (json.dumps({"format": "nystrom attention plan", "measurements": {}, "layers": 3}), "one per layer"),
    ],
)
def test_a_file_that_is_no_plan_raises_in_one_line(content, says, tmp_path):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=says) as caught:
        read_plan(path)
    assert "\n" not in str(caught.value)


def test_a_plan_for_another_number_of_layers_raises():
    with pytest.raises(ValueError, match="the plan has 4 layers but BertModel has 2"):
        AttentionPlan(LAYERS).check_layers(2, "BertModel")
