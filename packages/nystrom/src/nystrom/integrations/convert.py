"""Conversion of a trained BERT or RoBERTa to a Nyströmformer, and of trained models to longer inputs.

The weights stay the same. Attention becomes Nyström attention, or another requested method; the skip convolution starts
at zero; and position rows move to this library's numbering. So up to `num_landmarks` real tokens, where Nyström
attention is exact, the converted model equals its source; longer inputs are approximated, and need further training.

Carried over: the encoder, and the head for masked words, sequence or token classification, question answering or
multiple choice. Dropped, and reported by name: a pooler without a classifier on it, and next-sentence prediction. A
source with unsupported features, such as relative positions or a decoder, raises.

Departs from the sources: dropout of attention weights is 0, a classifier on a pooler also has dropout before the
pooler, and all masked tokens give the same vector. Positions count
from the first real token of the mask, where BERT also counts padding on the left, and RoBERTa the ids that are not
padding's, regardless of the mask; with their positions as `position_ids` real tokens agree.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from nystrom.attention.plan import PLAN, read_plan
from nystrom.command_options import ConvertOptions
from nystrom.integrations.bert_names import FAMILIES
from nystrom.integrations.new_model import POSITIONS, attention_choice, from_bert, from_own, one_tensor, with_weights
from nystrom.json_files import read_json
from nystrom.models.configuration import POSITION_OFFSET, EncoderConfig
from nystrom.models.files.folder import copy_sentence_modules, copy_tokenizer, fresh_folder
from nystrom.models.files.loading import check_weights
from nystrom.models.positions import resize_positions
from nystrom.whole_files import check_fresh


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion."""

    folder: Path  # Folder of the new model
    source: str  # Model type of the source
    model: str  # Class of the new model
    mapped: int  # Tensors taken from the source
    left_behind: tuple[str, ...]  # Tensors of the source that the new model dropped
    started: tuple[str, ...]  # Tensors that are new in the model; all are zero
    parameters: int  # Number of weights of the new model
    num_positions: tuple[int, int]  # The longest input of the source, and of the new model
    tokenizer: tuple[str, ...]  # Files of the tokenizer; empty if the source had none
    modules: tuple[str, ...]  # Files and folders of sentence-transformers; empty if the source had none

    def __str__(self) -> str:
        """A summary in a few lines."""
        lines = [
            f"{self.source} -> {self.model} in {self.folder}: {self.parameters:,} parameters",
            f"mapped: {self.mapped} tensors",
            f"left behind: {', '.join(self.left_behind) or 'nothing'}",
            f"started at zero: {f'{len(self.started)} skip convolutions' if self.started else 'nothing'}",
            f"positions: {self.num_positions[0]} -> {self.num_positions[1]}",
            f"tokenizer: {', '.join(self.tokenizer) or 'none in the source; copy one into the folder'}",
            *([f"sentence-transformers: {', '.join(self.modules)}"] if self.modules else []),
            "to load it in Python: import nystrom.integrations first, then as any folder of transformers",
        ]
        return "\n".join(lines)


def convert(request: ConvertOptions) -> Conversion:
    """Make a Nyströmformer from a BERT or RoBERTa, or give a Nyströmformer another number of positions.

    Returns:
        What was mapped, left behind and started.

    Raises:
        ValueError: A source that cannot be read or represented, or invalid options or folder.
    """
    source, to, plan = request.source, request.to, request.plan
    planned = None if plan is None else read_plan(plan)
    most = request.max_position_embeddings
    chosen = attention_choice(request.attention, request.options or {}, request.num_landmarks, most)
    check_fresh(to)
    check_weights(source)
    config = read_json(source / "config.json")
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        made = from_bert(source, chosen, request.conv_kernel_size)
    elif kind in (EncoderConfig.model_type, "nystromformer"):
        made = from_own(source, chosen, request.conv_kernel_size)
    else:
        known = ", ".join([*FAMILIES, "nystromformer", EncoderConfig.model_type])
        raise ValueError(
            f"{source} holds a model of type {kind!r}; expected one of {known}. For other models, "
            "attn_implementation='nystrom' replaces the attention alone, and 'near_far' that of T5 and its kin."
        )
    if planned is not None:
        planned.check_layers(made.config.num_hidden_layers, str(source))
        made.config.attention, made.config.attention_options = PLAN, planned.options
        # The published format has one method for all layers.
        made.config.segment_means_seq_len = None
    before = made.config.max_position_embeddings
    wanted = before if most is None else most
    if made.config.positions == "learned":
        name = f"{made.prefix}{POSITIONS}"
        table = one_tensor(made.tensors, name, source)
        # The token of the class has a position of its own, the first.
        kept = POSITION_OFFSET + (made.config.pooling == "cls")
        resized = resize_positions(table[kept:], wanted, how=request.stretch)
        made.tensors[name] = torch.cat([table[:kept], resized])
    made.config.max_position_embeddings = wanted
    model = with_weights(made, source)
    with fresh_folder(to) as partial:
        model.save_pretrained(partial)
        default = FAMILIES[kind].tokenizer if kind in FAMILIES else None
        tokenizer = copy_tokenizer(source, partial, max_length=wanted, default_class=default)
        modules = copy_sentence_modules(source, partial, max_length=wanted)
    return Conversion(
        folder=to,
        source=kind,
        model=type(model).__name__,
        mapped=made.mapped,
        left_behind=made.left_behind,
        started=made.started,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_positions=(before, wanted),
        tokenizer=tokenizer,
        modules=modules,
    )
