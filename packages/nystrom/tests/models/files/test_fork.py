"""A server may load a model and then fork its workers, which compute in several threads."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from nystrom.models import EncoderConfig, EncoderModel
from nystrom.models.files.loading import _GRAIN, check_weights

PROGRAM = """
import os, sys, torch
from pathlib import Path
from nystrom.models import EncoderModel

folder = Path(sys.argv[1])
torch.set_num_threads(4)
model = EncoderModel.from_pretrained(folder).eval()
ids = torch.arange(2000)[None]
child = os.fork()
if child == 0:
    with torch.no_grad():
        (folder / "states").write_bytes(model(ids).last_hidden_state.numpy().tobytes())
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
with torch.no_grad():
    states = model(ids).last_hidden_state
theirs = torch.frombuffer(bytearray((folder / "states").read_bytes()), dtype=torch.float32).view_as(states)
# The same operations on the same number of threads; a sum may be cut elsewhere in float32.
torch.testing.assert_close(theirs, states, rtol=1e-5, atol=1e-5)
"""


@pytest.mark.long
def test_a_model_that_was_loaded_before_a_fork_computes_in_the_child(tmp_path):
    sizes = {"vocab_size": 3000, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    EncoderModel(EncoderConfig(**sizes, intermediate_size=64, max_position_embeddings=2048)).save_pretrained(tmp_path)
    # A child that waits for threads that it does not have waits for ever.
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("place", [0, _GRAIN - 1, _GRAIN, 2 * _GRAIN + 5])
def test_a_number_that_is_not_finite_is_found_in_each_piece(dtype, place, tmp_path):
    weights = torch.zeros(2 * _GRAIN + 6, dtype=dtype)
    save_file({"whole": torch.zeros(0, 3), "weights": weights}, tmp_path / "model.safetensors")
    check_weights(tmp_path)
    weights[place] = float("nan")
    save_file({"weights": weights.view(2, -1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds numbers that are not finite, for example in weights"):
        check_weights(tmp_path)
