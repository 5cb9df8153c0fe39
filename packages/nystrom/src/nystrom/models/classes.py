"""All models built on the encoder, by their names in `architectures` of config.json."""

from pathlib import Path

from nystrom.models.configuration import EncoderConfig
from nystrom.models.encoder import EncoderModel, EncoderPreTrainedModel
from nystrom.models.heads.language import EncoderForMaskedLM, EncoderForPreTraining
from nystrom.models.heads.pairs import EncoderForPairClassification
from nystrom.models.heads.sequences import EncoderForSequenceClassification
from nystrom.models.heads.tokens import (
    EncoderForMultipleChoice,
    EncoderForQuestionAnswering,
    EncoderForTokenClassification,
)

_CLASSES: dict[str, type[EncoderPreTrainedModel]] = {
    kind.__name__: kind
    for kind in (
        EncoderModel,
        EncoderForMaskedLM,
        EncoderForMultipleChoice,
        EncoderForPairClassification,
        EncoderForPreTraining,
        EncoderForQuestionAnswering,
        EncoderForSequenceClassification,
        EncoderForTokenClassification,
    )
}


def model_class(config: EncoderConfig, folder: Path) -> type[EncoderPreTrainedModel]:
    """The class that a configuration names, the encoder without a head if none; ValueError for another class."""
    name = (config.architectures or [EncoderModel.__name__])[0]
    if name not in _CLASSES:
        raise ValueError(
            f"{folder / 'config.json'} names the model {name!r}; expected one of {', '.join(sorted(_CLASSES))}."
        )
    return _CLASSES[name]
