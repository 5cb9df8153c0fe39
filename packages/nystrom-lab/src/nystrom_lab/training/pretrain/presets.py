"""The settings of pretraining on masked words and sentence order.

- "bert-small" and "bert-base": the paper's two models, on instances of 512 tokens: batches of 256, AdamW(0.9, 0.999) at
  1e-4 with weight decay 0.01, 10,000 steps of warm-up, then linear decay; 100,000 steps and 500,000, and for
  "bert-base" 250,000 if it starts from a trained model. 64 landmarks and a convolution of 33 taps.
- "longer": more positions for a trained model, of any size, by repeating its table: 1,024 tokens, batches of 128,
  40,000 steps at 1e-5 without a warm-up.
- "demo": ours, for an hour or less on two cores.

Source: Xiong et al. (2021), arXiv:2102.03902, section 5.1, and its supplement, sections (A) and (C).
Departs from it, or fills what it leaves open:

- the paper gives BERT-small 4 layers and no width: here it is 512 with 8 heads and 2,048 inside the feed-forward block,
  the BERT-small of Turc et al. (2019), arXiv:1908.08962;
- AdamW, whose weight decay is apart from the gradient, as in BERT's own code, instead of "Adam" with "L2 weight decay";
- gradients are clipped to a norm of 1, AdamW's epsilon is 1e-6, dropout on the hidden states 0.1 and the initial
  standard deviation 0.02, as in BERT's own code;
- attention weights are not dropped, since no method stores them;
- Linformer has its authors' 256 projections, and the weights of one layer serve all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nystrom.checks import check_names
from nystrom_lab.config import EncoderSize, Loop, Optimizer
from nystrom_lab.training.presets import Methods, MethodSetting, linformer


def _methods(length: int) -> Mapping[str, MethodSetting]:
    return {
        "nystrom": MethodSetting({"num_landmarks": 64}, conv_kernel_size=33),
        "linformer": linformer(256, length),
    }


def _demo_methods(length: int) -> Mapping[str, MethodSetting]:
    return {
        # As many tokens to a landmark, and to a projection, as in the paper.
        "nystrom": MethodSetting({"num_landmarks": 32}, conv_kernel_size=33),
        "linformer": linformer(128, length),
    }


@dataclass(frozen=True, kw_only=True)
class PretrainingPreset(Loop, EncoderSize, Optimizer):
    """Settings of one pretraining; sizes that are None are those of the starting model.

    Attributes:
        name: Name.
        source: The paper that the settings come from.
        steps_from_model: Steps of a run that starts from a trained model; None for `steps`.
        lengthens: Whether the starting model gets more positions if it has fewer than `length`.
        methods: Function from the number of positions to the settings of each method, by name.
        hidden_act: Activation.
        initializer_range: Standard deviation of the initial weights.
        adam_epsilon: Epsilon of AdamW.
    """

    name: str
    source: str
    steps_from_model: int | None = None
    lengthens: bool = False
    methods: Methods = _methods
    hidden_act: str = "gelu"
    initializer_range: float = 0.02
    adam_epsilon: float = 1e-6


BERT_SMALL = PretrainingPreset(
    name="bert-small",
    source="Xiong et al. 2021, arXiv:2102.03902",
    schedule="linear",
    clip_norm=1.0,
    adam_betas=(0.9, 0.999),
    weight_decay=0.01,
    length=512,
    steps=100_000,
    batch_size=256,
    learning_rate=1e-4,
    warmup_steps=10_000,
    dropout=0.1,
    evaluate_every=1_000,
    log_every=100,
    hidden_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    intermediate_size=2048,
)
_OF_MODEL = {"hidden_size": None, "num_hidden_layers": None, "num_attention_heads": None, "intermediate_size": None}

PRETRAINING: dict[str, PretrainingPreset] = {
    preset.name: preset
    for preset in (
        BERT_SMALL,
        replace(
            BERT_SMALL,
            name="bert-base",
            steps=500_000,
            steps_from_model=250_000,
            evaluate_every=5_000,
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            intermediate_size=3072,
        ),
        replace(
            BERT_SMALL,
            name="longer",
            length=1024,
            steps=40_000,
            batch_size=128,
            learning_rate=1e-5,
            warmup_steps=0,
            lengthens=True,
            **_OF_MODEL,
        ),
        replace(
            BERT_SMALL,
            name="demo",
            source="nystrom",
            methods=_demo_methods,
            length=256,
            steps=2_000,
            batch_size=16,
            learning_rate=5e-4,
            warmup_steps=200,
            evaluate_every=200,
            log_every=20,
            hidden_size=256,
            num_attention_heads=4,
            intermediate_size=1024,
        ),
    )
}


def find_pretraining(name: str) -> PretrainingPreset:
    """Look up a preset.

    Raises:
        ValueError: There is no preset of that name.
    """
    check_names("preset", [name], PRETRAINING)
    return PRETRAINING[name]
