"""The model that is fine-tuned: an encoder from a folder, a new head, and the requested attention.

Encoders of this library, published Nyströmformers among them, become `EncoderForSequenceClassification`; those of
transformers are loaded by AutoModelForSequenceClassification, with a method in place of their attention. Dropout of
attention weights is 0 in all of them: no method stores weights, and with dropout transformers' exact attention could
not run fused.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from nystrom.integrations.model_loader import load_model, read_model_config
from nystrom.integrations.saving import check_can_be_saved
from nystrom.integrations.set_attention import check_attention, set_attention
from nystrom.models import EncoderConfig, EncoderForSequenceClassification
from nystrom.models.files.loading import find_folder
from nystrom.models.files.published import PUBLISHED_TYPE
from nystrom_lab.data.language.tokenizer import load_tokenizer
from nystrom_lab.training.finetune.finetune_settings import model_name
from nystrom_lab.training.run_progress import no_load_report
from nystrom_lab.training.start import StartModel, find_start, model_type

EXACT = "softmax"
_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout")
# A vocabulary may be padded to a round number; a tokenizer with a smaller share of it belongs to another model.
_KNOWN = 0.9


@dataclass(frozen=True)
class StartClassifier(StartModel):
    """A saved model with its tokenizer and the requested attention, set in its configuration if possible.

    Attributes:
        name: Name in rows.
        attention: Method.
        options: Options of the method.
        tokenizer: Tokenizer of the model.
    """

    name: str
    attention: str
    options: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase

    @property
    def segments(self) -> bool:
        """Whether the model distinguishes the texts of a pair (token_type_ids)."""
        return (getattr(self.config, "type_vocab_size", 0) or 0) > 1


def find_classifier(model: str, *, attention: str | None, options: Mapping[str, Any] | None) -> StartClassifier:
    """Read the configuration and the tokenizer of a model, and check them.

    Args:
        model: A folder, or OWNER/NAME of the Hugging Face Hub.
        attention: Method to use instead of its own; None keeps its own.

    Raises:
        ValueError: No such model, no weights, a tokenizer with another vocabulary, or an attention that the model
            cannot use.
    """
    folder = find_folder(model, {})
    if not Path(model).is_dir():
        # From the hub the tokenizer has a download of its own, which comes before the fingerprint.
        load_tokenizer(model)
    changes: dict[str, Any] = {} if attention is None else {"attention": attention}
    if options:
        changes["attention_options"] = dict(options)
    if changes and model_type(folder) == PUBLISHED_TYPE:
        # Another attention than that format can say is written in this library's own.
        changes["segment_means_seq_len"] = None
    start = find_start(folder, **changes)
    config, tokenizer = start.config, load_tokenizer(model)
    if start.own:
        attention, chosen = str(config.attention), dict(config.attention_options)
    else:
        if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            raise ValueError(
                f"model {folder} is of type {config.model_type!r}, which has no classifier in transformers."
            )
        stored = getattr(config, "_attn_implementation", None)
        if attention is None and stored not in (None, "sdpa", "eager"):
            attention, options = str(stored), {**(getattr(config, "attention_options", None) or {}), **(options or {})}
        attention, chosen = attention or EXACT, dict(options or {})
        if attention == EXACT and chosen:
            raise ValueError(
                f"{', '.join(chosen)} {'is' if len(chosen) == 1 else 'are'} given for exact attention: name the method "
                "with --attention, such as --attention nystrom."
            )
    check_vocabulary(folder, tokenizer, config.vocab_size)
    return StartClassifier(
        folder,
        start.fingerprint,
        config,
        name=model_name(model),
        attention=attention,
        options=chosen,
        tokenizer=tokenizer,
    )


def make_classifier(
    start: StartClassifier, *, classes: Sequence[str] | None, task: str, pairs: bool
) -> PreTrainedModel:
    """Make the model to train; its head is new unless the folder has a matching one.

    Args:
        classes: Names of the classes; None for numbers.
        pairs: Whether it classifies pairs of texts; stored in the configuration.

    Raises:
        ValueError: Weights that do not match, or an attention that the model cannot use.
    """
    config = start.config
    config.id2label = dict(enumerate(classes or ("LABEL_0",)))
    config.label2id = {name: place for place, name in config.id2label.items()}
    config.problem_type = "regression" if classes is None else "single_label_classification"
    config.text_pairs = pairs
    if start.own:
        config.task = task
    else:
        config.finetuning_task = task
        # A name in config.json is set by set_attention, with its options checked.
        config._attn_implementation = "sdpa"
        for name in _DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, 0.0)
    # transformers would log a table of the new head.
    with no_load_report():
        model, _ = load_model(start.folder, _kind_of(config), config=config, new_heads=True)
    if not start.own:
        # Their loss is a mean over the batch; the Trainer would otherwise multiply it by parts and processes.
        model.accepts_loss_kwargs = False
        if start.attention != EXACT:
            set_attention(model, start.attention, start.options)
            check_attention(model.eval(), {"input_ids": torch.zeros(1, 2, dtype=torch.long)})
            check_can_be_saved(model)
    return model


def _kind_of(config: Any) -> Any:
    """The class of a classifier of this library, or transformers' Auto class."""
    return EncoderForSequenceClassification if isinstance(config, EncoderConfig) else AutoModelForSequenceClassification


def blank_classifier(start: StartClassifier) -> PreTrainedModel:
    """The model with new weights, to inspect its structure.

    Raises:
        ValueError: An attention that the model cannot use.
    """
    if start.own:
        return EncoderForSequenceClassification(start.config)
    model = AutoModelForSequenceClassification.from_config(start.config, trust_remote_code=False)
    if start.attention != EXACT:
        set_attention(model, start.attention, start.options)
    return model


def check_vocabulary(folder: Path, tokenizer: PreTrainedTokenizerBase, known: int) -> None:
    """Check that a tokenizer belongs to a model whose vocabulary has `known` tokens.

    Raises:
        ValueError: It does not.
    """
    words = len(tokenizer)
    if not _KNOWN * known <= words <= known:
        raise ValueError(
            f"the tokenizer of model {folder} has {words} tokens but the model {known}: they do not belong together; "
            "copy the files of the tokenizer that it was trained with into the folder."
        )


def load_classifier(folder: Path) -> PreTrainedModel:
    """Load a fine-tuned model, with the attention that its folder names.

    Raises:
        ValueError: The folder holds no classifier, or a broken one.
    """
    config = read_model_config(folder)
    name = (config.architectures or ["no model"])[0]
    if not name.endswith("ForSequenceClassification"):
        raise ValueError(
            f"model {folder} is not a text classifier (its config.json names {name!r}): name the folder best of a run "
            "of `nystrom finetune`."
        )
    model, report = load_model(folder, _kind_of(config), config=config)
    _check_complete(report, folder)
    return model


def _check_complete(report: Mapping[str, Any], folder: Path) -> None:
    """Raise ValueError if a weight is missing or left over."""
    if wrong := sorted([*report["missing_keys"], *report["unexpected_keys"]]):
        raise ValueError(f"model {folder} does not fit its config.json, for example in {wrong[0]}: save it again.")


def takes_segments(model: PreTrainedModel) -> bool:
    """Whether the forward method of a model takes token_type_ids."""
    return "token_type_ids" in inspect.signature(model.forward).parameters
