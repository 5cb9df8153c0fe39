"""Every method learns a task that only attention can solve: look up a value by the first token.

The first token names one of four colours. Each other token has a colour and a value; the value is the same for all
tokens of a colour in a sample, and another draw in the next. The class is the value of that colour.
The head reads the first token alone, so whatever it knows of the others came through the attention.
"""

import pytest
import torch
from torch import Tensor

from nystrom.attention.registry import METHODS
from nystrom.models import EncoderConfig, EncoderForSequenceClassification

COLOURS, TOKENS, STEPS = 4, 25, 200

# The methods of this library; the others take as long, and are learned with in the slow tests.
QUICK = ("softmax", "nystrom", "near_far", "skyformer")
# Fewer landmarks, features, queries or blocks than there are tokens, so that no method is exact.
OPTIONS = {
    "nystrom": {"num_landmarks": 8},
    "near_far": {"block_size": 4, "reach": 1, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0},
    "skyformer": {"num_landmarks": 8},
    "skyformer_softmax": {"num_landmarks": 8},
    "performer": {"num_features": 64},
    "linformer": {"num_features": 16, "max_length": TOKENS},
    "informer": {"num_queries": 8, "num_samples": 16},
    "reformer": {"chunk_size": 8, "num_hashes": 4},
    "longformer": {"window": 9, "num_global": 1},
    "bigbird": {"block_size": 4, "num_random_blocks": 1},
}


def draw(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    values = torch.randint(2, (samples, COLOURS), generator=generator)
    colours = torch.randint(COLOURS, (samples, TOKENS - 1), generator=generator)
    asked = torch.randint(COLOURS, (samples, 1), generator=generator)
    tokens = torch.cat([2 * COLOURS + asked, 2 * colours + values.gather(1, colours)], dim=1)
    return tokens, values.gather(1, asked)[:, 0]


def small_model(method: str) -> EncoderForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    sizes |= {"vocab_size": 3 * COLOURS, "max_position_embeddings": TOKENS, "num_labels": 2}
    how = {"hidden_dropout_prob": 0.0, "initializer_range": 0.2, "norm": "pre", "pooling": "first"}
    config = EncoderConfig(**sizes, **how, attention=method, attention_options=OPTIONS.get(method, {}))
    return EncoderForSequenceClassification(config)


def best_accuracy(model: EncoderForSequenceClassification, *, steps: int, enough: float) -> float:
    """The accuracy on new samples, measured every 50 steps until it is sufficient."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer, generator = torch.optim.Adam(weights, lr=2e-3), torch.Generator().manual_seed(0)
    tokens, labels = draw(1000, torch.Generator().manual_seed(1))
    best = 0.0
    for step in range(1, steps + 1):
        x, y = draw(64, generator)
        optimizer.zero_grad()
        model(x, labels=y).loss.backward()
        optimizer.step()
        if step % 50 == 0:
            model.eval()
            with torch.no_grad():
                best = max(best, float((model(tokens).logits.argmax(dim=-1) == labels).float().mean()))
            model.train()
            if best >= enough:
                break
    return best


@pytest.mark.parametrize(
    "method", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
@pytest.mark.long
def test_every_method_learns_to_look_up_a_value(method):
    assert best_accuracy(small_model(method), steps=STEPS, enough=0.95) >= 0.95


@pytest.mark.long
def test_without_attention_nothing_is_learnt():
    model = small_model("softmax")
    out = model.nystromformer.encoder.layer[0].attention.output.dense.weight
    torch.nn.init.zeros_(out).requires_grad_(False)
    # Half is chance; of a thousand samples 0.6 is six deviations away.
    assert best_accuracy(model, steps=STEPS, enough=0.95) < 0.6
