"""The model that a pretraining starts from: a BERT or RoBERTa, a Nyströmformer, or a run of this library.

The weights are kept. A different attention method replaces its own, a new skip convolution of the values starts at
zero, additional positions repeat its table, and missing heads are new.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nystrom.attention.method_names import NO_ATTENTION
from nystrom.command_options import ConvertOptions
from nystrom.integrations.bert_names import FAMILIES, longest_input, read_config
from nystrom.integrations.convert import convert
from nystrom.models.configuration import POSITION_OFFSET, EncoderConfig
from nystrom.models.heads.language import EncoderForPreTraining
from nystrom.models.positions import resize_positions
from nystrom.temporary import naming, scratch_folder
from nystrom_lab.data.language.mlm_sop.vocabulary import Vocabulary
from nystrom_lab.data.language.tokenizer import load_tokenizer
from nystrom_lab.training.pretrain.pretrain_settings import SIZES, PretrainingSettings
from nystrom_lab.training.start import StartModel, find_start, load_start

_POSITIONS = "nystromformer.embeddings.position_embeddings.weight"
_REPLACED = (".attention.self.method.", ".attention.self.conv.")


def find_source(folder: Path) -> StartModel:
    """Read the model of a folder.

    Raises:
        ValueError: The folder holds no model, another kind of model, one with features that the encoder does not
            support, or no safetensors.
    """
    start = find_start(folder, kinds=[*FAMILIES, "nystromformer", EncoderConfig.model_type])
    if not start.own:
        read_config(folder)
    return start


def check_vocabulary(source: StartModel, data: Path, vocabulary: Vocabulary) -> None:
    """Check that prepared data use the vocabulary of a model.

    Args:
        source: The model. If there is a tokenizer in its folder, it must have the same tokens as that of the data; if
            there is none, only the number of tokens is compared.
        data: The prepared folder, which holds its tokenizer.

    Raises:
        ValueError: They are not.
    """
    way_out = "prepare the data with the tokenizer of the model, or name a model with their tokenizer."
    known = source.config.vocab_size
    if vocabulary.size > known:
        raise ValueError(
            f"data {data} have a vocabulary of {vocabulary.size} tokens but model {source.folder} has "
            f"{known}: {way_out}"
        )
    files = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model")
    if not any((source.folder / name).is_file() for name in files):
        if vocabulary.size != known:
            raise ValueError(
                f"data {data} have a vocabulary of {vocabulary.size} tokens, model {source.folder} has "
                f"{known} and no tokenizer to compare: copy its tokenizer into its folder, or {way_out}"
            )
        return
    ours, theirs = (load_tokenizer(folder).get_vocab() for folder in (data, source.folder))
    if ours != theirs:
        token = min(
            (token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)),
            key=lambda token: (min(words.get(token, len(words)) for words in (ours, theirs)), token),
        )
        raise ValueError(
            f"data {data} are tokens of another tokenizer than that of model {source.folder}: {token!r} is "
            f"{_number(ours, token)} there and {_number(theirs, token)} in the model: {way_out}"
        )


def encoder_config(settings: PretrainingSettings, base: Mapping[str, Any], vocabulary: Vocabulary) -> EncoderConfig:
    """The configuration of a model trained from scratch.

    Args:
        base: Fields that the preset sets: the activation and the initial standard deviation.

    Raises:
        ValueError: An unknown method or option, or a value that the model does not support.
    """
    return EncoderConfig(
        vocab_size=vocabulary.size,
        pad_token_id=vocabulary.pad_token_id,
        type_vocab_size=2,
        **{name: getattr(settings, name) for name in SIZES},
        **base,
        **_of_run(settings),
    )


def start_model(settings: PretrainingSettings, source: StartModel) -> tuple[EncoderForPreTraining, list[str]]:
    """The model of a run, with the weights of the starting model, and a list of its new parts.

    Raises:
        ValueError: Weights that do not match, or a BERT with features that the encoder does not support.
    """
    with scratch_folder() as scratch:
        folder = source.folder
        if not source.own:
            folder = scratch / "converted"
            convert(ConvertOptions(source.folder, folder, conv_kernel_size=None))
        with naming(source.folder, folder):
            before, loaded = load_start(folder, EncoderForPreTraining, segment_means_seq_len=None)
    config = EncoderConfig.from_dict(before.config.to_dict() | _of_run(settings))
    if config.attention != before.config.attention == NO_ATTENTION:
        raise ValueError(
            f"model {source.folder} has no attention, and so no queries and keys for {config.attention}: name another "
            "model, or leave --attention out."
        )
    tensors = before.state_dict()
    if config.positions == "learned":
        table = tensors[_POSITIONS]
        resized = resize_positions(table[POSITION_OFFSET:], settings.num_positions, how="repeat")
        tensors[_POSITIONS] = torch.cat([table[:POSITION_OFFSET], resized])
    model = EncoderForPreTraining(config)
    if (before.config.attention, before.config.attention_options) != (config.attention, config.attention_options):
        tensors = {name: tensor for name, tensor in tensors.items() if _REPLACED[0] not in name}
    if before.config.conv_kernel_size != config.conv_kernel_size:
        tensors = {name: tensor for name, tensor in tensors.items() if _REPLACED[1] not in name}
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if _REPLACED[1] in name:
                    weight.zero_()
    report = model.load_state_dict(tensors, strict=False)
    unfit = [name for name in report.missing_keys if not any(part in name for part in _REPLACED)]
    assert not unfit, f"{unfit[0]} has no start"
    assert not report.unexpected_keys, f"{report.unexpected_keys[0]} has no place"
    heads = {"cls": "masked words", "sop": "the order of sentences"}
    new = [
        f"a new head for {what}"
        for head, what in heads.items()
        if any(name.startswith(head) for name in loaded["missing_keys"])
    ]
    if any(_REPLACED[0] in name for name in report.missing_keys):
        new.append(f"new weights of {settings.attention} attention")
    return model, new


def describe(source: StartModel, settings: PretrainingSettings, new: Sequence[str]) -> str:
    """The new parts, in one line; everything else is kept."""
    changes = [*new]
    before = source.config.attention if source.own else "exact"
    if before != settings.attention:
        changes.append(f"{before} attention becomes {settings.attention}")
    if (source.method.conv_kernel_size if source.own else None) != settings.conv_kernel_size:
        taps = settings.conv_kernel_size
        changes.append("no convolution" if taps is None else f"a convolution of {taps} taps starts at zero")
    if (positions := longest_input(source.config)) != settings.num_positions:
        changes.append(f"positions {positions} -> {settings.num_positions}, its table repeated")
    return f"starting from {source.folder}{': ' if changes else ''}{'; '.join(changes)}"


def _of_run(settings: PretrainingSettings) -> dict[str, Any]:
    return {
        "attention": settings.attention,
        "attention_options": dict(settings.options),
        "share_attention_weights": settings.share_projections,
        "conv_kernel_size": settings.conv_kernel_size,
        "max_position_embeddings": settings.num_positions,
        "hidden_dropout_prob": settings.dropout,
        "pooling": "first",
        "sparse_prediction": True,
        "task": "mlm-sop",
    }


def _number(tokens: Mapping[str, int], token: str) -> str:
    return f"token {tokens[token]}" if token in tokens else "no token"
