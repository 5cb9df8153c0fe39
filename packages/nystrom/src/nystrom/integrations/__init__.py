"""Integrations: transformers' encoders, `nn.MultiheadAttention`, timm, nystrom-attention, and conversion of BERT.

If transformers is installed, importing this package registers the methods as `attn_implementation` of transformers'
encoders: see `nystrom.integrations.attention_interface`.
"""

from importlib.util import find_spec

from nystrom.integrations.modules import replace_attention
from nystrom.integrations.nystrom_attention import from_nystrom_attention

__all__ = ["from_nystrom_attention", "replace_attention"]

if find_spec("transformers") is not None:
    from nystrom.integrations.attention_interface import register_methods
    from nystrom.integrations.over_ranks import parallelize_transformers
    from nystrom.integrations.patches import patch_transformers
    from nystrom.integrations.saving import save_with_attention
    from nystrom.integrations.set_attention import AttentionUse, check_attention, set_attention
    from nystrom.parallel.models import pass_parallelize

    register_methods()
    patch_transformers()
    pass_parallelize(parallelize_transformers)
    __all__ += ["AttentionUse", "check_attention", "save_with_attention", "set_attention"]
