"""One transformer encoder in Hugging Face format, with any attention of the library.

Importing this package registers its models with transformers' AutoConfig and AutoModel classes, which then load folders
of `model_type` "nystrom". Folders in the published format, "nystromformer", load through the classes here; there
AutoModel goes on giving transformers' own. It also registers the methods as `attn_implementation` of transformers' own
encoders: see `nystrom.encoder.patch`.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from nystrom.encoder.configuration import EncoderConfig
from nystrom.encoder.heads import EncoderForSequenceClassification
from nystrom.encoder.language_heads import EncoderForMaskedLM, EncoderForPreTraining
from nystrom.encoder.modeling import EncoderModel
from nystrom.encoder.patch import register_methods
from nystrom.encoder.set_attention import AttentionUse, check_attention, set_attention
from nystrom.encoder.token_heads import (
    EncoderForMultipleChoice,
    EncoderForQuestionAnswering,
    EncoderForTokenClassification,
)

AutoConfig.register(EncoderConfig.model_type, EncoderConfig, exist_ok=True)
AutoModel.register(EncoderConfig, EncoderModel, exist_ok=True)
AutoModelForMaskedLM.register(EncoderConfig, EncoderForMaskedLM, exist_ok=True)
AutoModelForMultipleChoice.register(EncoderConfig, EncoderForMultipleChoice, exist_ok=True)
AutoModelForPreTraining.register(EncoderConfig, EncoderForPreTraining, exist_ok=True)
AutoModelForQuestionAnswering.register(EncoderConfig, EncoderForQuestionAnswering, exist_ok=True)
AutoModelForSequenceClassification.register(EncoderConfig, EncoderForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(EncoderConfig, EncoderForTokenClassification, exist_ok=True)
register_methods()

__all__ = [
    "AttentionUse",
    "EncoderConfig",
    "EncoderForMaskedLM",
    "EncoderForMultipleChoice",
    "EncoderForPreTraining",
    "EncoderForQuestionAnswering",
    "EncoderForSequenceClassification",
    "EncoderForTokenClassification",
    "EncoderModel",
    "check_attention",
    "set_attention",
]
