"""One transformer encoder in Hugging Face format, with any attention of the library.

Importing this package registers it with transformers' AutoConfig, AutoModel and AutoModelForSequenceClassification.
"""

from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from nystrom.encoder.configuration import EncoderConfig
from nystrom.encoder.heads import EncoderForSequenceClassification
from nystrom.encoder.modeling import EncoderModel

AutoConfig.register(EncoderConfig.model_type, EncoderConfig, exist_ok=True)
AutoModel.register(EncoderConfig, EncoderModel, exist_ok=True)
AutoModelForSequenceClassification.register(EncoderConfig, EncoderForSequenceClassification, exist_ok=True)

__all__ = ["EncoderConfig", "EncoderForSequenceClassification", "EncoderModel"]
