"""A transformer encoder in Hugging Face format, with any attention method of the library.

Importing this package registers its models with transformers' AutoConfig and AutoModel classes, which then load folders
of `model_type` "nystrom". Folders in the published format, "nystromformer", load through the classes here; AutoModel
still gives transformers' own classes for them.
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

from nystrom.models.configuration import EncoderConfig
from nystrom.models.encoder import EncoderModel
from nystrom.models.heads.language import EncoderForMaskedLM, EncoderForPreTraining
from nystrom.models.heads.pairs import EncoderForPairClassification
from nystrom.models.heads.sequences import EncoderForSequenceClassification
from nystrom.models.heads.tokens import (
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

__all__ = [
    "EncoderConfig",
    "EncoderForMaskedLM",
    "EncoderForMultipleChoice",
    "EncoderForPairClassification",
    "EncoderForPreTraining",
    "EncoderForQuestionAnswering",
    "EncoderForSequenceClassification",
    "EncoderForTokenClassification",
    "EncoderModel",
]
