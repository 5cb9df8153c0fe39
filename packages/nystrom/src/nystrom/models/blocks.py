r"""The two blocks of a layer, attention and feed-forward, and the stack of layers.

**Attention** projects the tokens x, convolves the projections along the tokens where the configuration has short
convolutions c (`nystrom.models.parts.modern`), turns queries and keys by R where positions are rotary
(`nystrom.models.parts.rotary`), and lets the method attend:
$$q_i = R_i\, c_q(W_q x)_i,\quad k_i = R_i\, c_k(W_k x)_i,\quad v_i = c_v(W_v x)_i,$$
$$a = \mathrm{attention}(q, k, v) + \mathrm{skip}(v).$$
So landmarks are means of convolved and turned queries and keys. Without attention $a = v + \mathrm{skip}(v)$, and there
are neither queries nor keys.

**Feed-forward** widens with the activation g, by `feed_forward`:
$$\text{plain: } g(W x), \qquad \text{gated: } g(G x) \odot W x, \qquad \text{glu: } \sigma(G x) \odot W x,$$
each with its biases; then a projection back. "gated" with gelu is GEGLU, with silu SwiGLU.

Source: Xiong et al. (2021), arXiv:2102.03902; the gates are those of Shazeer (2020), arXiv:2002.05202.
"""

from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from nystrom.attention.heads import AttentionHeads, attend_in_heads, build_attention, merge_heads, split_heads
from nystrom.attention.method_names import NO_ATTENTION
from nystrom.attention.registry import METHODS
from nystrom.attention.skip import DepthwiseSkip
from nystrom.models.configuration import EncoderConfig
from nystrom.models.parts.activations import activation
from nystrom.models.parts.dropout import Dropout
from nystrom.models.parts.dropped_weights import DroppedWeights
from nystrom.models.parts.modern import ShortConvolution
from nystrom.models.parts.rotary import Rotation, rotate
from nystrom.shapes import Masks


def build_method(config: EncoderConfig, layer: int) -> AttentionHeads | None:
    """The method of a layer; None if values pass through unchanged."""
    method, options = config.layer_attention(layer)
    if method == NO_ATTENTION:
        return None
    if share := config.attention_probs_dropout_prob:
        kind = METHODS[method].options
        return DroppedWeights(method, kind(**options), config.num_attention_heads, config.head_size, share=share)
    return build_attention(method, num_heads=config.num_attention_heads, head_dim=config.head_size, **options)


class EncoderSelfAttention(nn.Module):
    """Projections and their convolutions, the method, and the skip convolution of the values if there is one."""

    def __init__(self, config: EncoderConfig, layer: int):
        super().__init__()
        tokens, self.num_heads = config.hidden_size, config.num_attention_heads
        width, attends = config.head_size * self.num_heads, config.attention != NO_ATTENTION
        self.query = nn.Linear(tokens, width) if attends else None
        self.key = nn.Linear(tokens, width) if attends else None
        self.value = nn.Linear(tokens, width)
        self.method = build_method(config, layer)
        size = config.conv_kernel_size
        self.conv = None if size is None else DepthwiseSkip(self.num_heads, size)
        taps = config.short_conv_kernel_size
        self.query_conv = None if taps is None or not attends else ShortConvolution(width, taps)
        self.key_conv = None if taps is None or not attends else ShortConvolution(width, taps)
        self.value_conv = None if taps is None else ShortConvolution(width, taps)

    def borrow_method(self, lender: "EncoderSelfAttention") -> None:
        """Share the method of another layer, which keeps owning it: its weights have one name and are saved once."""
        del self.method
        object.__setattr__(self, "method", lender.method)

    def forward(
        self, x: Float[Tensor, "b n w"], keep: Bool[Tensor, "b n"] | None, turn: Rotation | None = None
    ) -> Float[Tensor, "b n w"]:
        """Attend within each sequence."""
        v = _convolve(self.value_conv, self.value(x), keep)
        if self.method is None:
            return v if self.conv is None else self._passed(v, keep)
        assert self.query is not None
        assert self.key is not None
        q = _convolve(self.query_conv, self.query(x), keep)
        k = _convolve(self.key_conv, self.key(x), keep)
        if turn is not None:
            q, k = (rotate(part, turn, num_heads=self.num_heads) for part in (q, k))
        return attend_in_heads(self.method, q, k, v, masks=Masks(keep), conv=self.conv)

    def _passed(self, v: Float[Tensor, "b n w"], keep: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b n w"]:
        """The values, and their convolution."""
        assert self.conv is not None
        values = split_heads(v, self.num_heads)
        return merge_heads(self.conv(values, keep=keep, to=values))


def _convolve(
    conv: ShortConvolution | None, x: Float[Tensor, "b n w"], keep: Bool[Tensor, "b n"] | None
) -> Float[Tensor, "b n w"]:
    return x if conv is None else conv(x, keep)


class EncoderOutput(nn.Module):
    """The output projection of a block, and its norm before or after the block: `after(block(before(x)), x)`."""

    def __init__(self, config: EncoderConfig, width: int):
        super().__init__()
        self.pre = config.norm == "pre"
        self.dense = nn.Linear(width, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def before(self, x: Float[Tensor, "b n w"]) -> Float[Tensor, "b n w"]:
        """The input of the block."""
        return self.LayerNorm(x) if self.pre else x

    def after(self, y: Float[Tensor, "b n y"], x: Float[Tensor, "b n w"]) -> Float[Tensor, "b n w"]:
        """Project the block's output, and add it."""
        x = x + self.dropout(self.dense(y))
        return x if self.pre else self.LayerNorm(x)


class EncoderAttention(nn.Module):
    """The attention block."""

    def __init__(self, config: EncoderConfig, layer: int):
        super().__init__()
        self.self = EncoderSelfAttention(config, layer)
        self.output = EncoderOutput(config, config.head_size * config.num_attention_heads)

    def forward(
        self, x: Float[Tensor, "b n w"], keep: Bool[Tensor, "b n"] | None, turn: Rotation | None = None
    ) -> Float[Tensor, "b n w"]:
        """Attend, and add."""
        return self.output.after(self.self(self.output.before(x), keep, turn), x)


class EncoderIntermediate(nn.Module):
    """The widening half of the feed-forward block."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        width, wide = config.hidden_size, config.intermediate_size
        self.dense = nn.Linear(width, wide)
        self.gate = None if config.feed_forward == "plain" else nn.Linear(width, wide)
        self.activation = nn.Sigmoid() if config.feed_forward == "glu" else activation(config.hidden_act)
        self.dropout = Dropout(0.0 if config.design == "transformers" else config.hidden_dropout_prob)

    def forward(self, x: Float[Tensor, "b n w"]) -> Float[Tensor, "b n f"]:
        """Widen the tokens, with the activation and the gate."""
        wide = self.dense(x)
        return self.dropout(self.activation(wide) if self.gate is None else self.activation(self.gate(x)) * wide)


class EncoderLayer(GradientCheckpointingLayer):
    """Attention, then feed-forward."""

    def __init__(self, config: EncoderConfig, layer: int):
        super().__init__()
        self.attention = EncoderAttention(config, layer)
        self.intermediate = EncoderIntermediate(config)
        self.output = EncoderOutput(config, config.intermediate_size)

    def forward(
        self, x: Float[Tensor, "b n w"], keep: Bool[Tensor, "b n"] | None, turn: Rotation | None = None
    ) -> Float[Tensor, "b n w"]:
        """Run both blocks."""
        x = self.attention(x, keep, turn)
        return self.output.after(self.intermediate(self.output.before(x)), x)


class EncoderStack(nn.Module):
    """The layers, and with "pre" the final norm."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.layer = nn.ModuleList([EncoderLayer(config, number) for number in range(config.num_hidden_layers)])
        if config.share_attention_weights:
            self._share_methods(config.attention)
        if config.norm == "pre":
            self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        else:
            self.LayerNorm = None

    def _share_methods(self, attention: str) -> None:
        attentions = [module for module in self.layer.modules() if isinstance(module, EncoderSelfAttention)]
        method = attentions[0].method
        if method is None or not list(method.parameters()):
            raise ValueError(
                f"share_attention_weights is True, but {attention} has no learned weights to share: leave it out."
            )
        for other in attentions[1:]:
            other.borrow_method(attentions[0])

    def forward(
        self, x: Float[Tensor, "b n w"], keep: Bool[Tensor, "b n"] | None, turn: Rotation | None = None
    ) -> Float[Tensor, "b n w"]:
        """Run all layers."""
        for layer in self.layer:
            x = layer(x, keep, turn)
        return x if self.LayerNorm is None else self.LayerNorm(x)
