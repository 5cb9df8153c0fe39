"""What an encoder takes at least, and that more than the machine has is refused."""

import pytest

from nystrom.models import EncoderConfig, EncoderModel
from nystrom.models.memory import check_memory, least_weights


@pytest.mark.parametrize("feed_forward", ["plain", "glu", "gated"])
def test_no_encoder_has_fewer_weights(feed_forward):
    config = EncoderConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24,
        feed_forward=feed_forward,
    )  # fmt: skip
    least = least_weights(layers=3, width=16, intermediate=24, vocabulary=30)
    assert least == 2 * 3 * 16 * 24 + 30 * 16
    assert least <= sum(weight.numel() for weight in EncoderModel(config).parameters())


@pytest.mark.parametrize(("layers", "width"), [(2, 10**9), (10**7, 8)])
def test_what_no_memory_holds_is_refused(layers, width):
    with pytest.raises(ValueError, match=r"but this machine has .* GB: take a smaller one") as error:
        check_memory(layers=layers, width=width, intermediate=8, vocabulary=30, numbers=1)
    assert f"{layers:,} layers, width {width:,}" in str(error.value)
    check_memory(layers=2, width=8, intermediate=8, vocabulary=30, numbers=4)
