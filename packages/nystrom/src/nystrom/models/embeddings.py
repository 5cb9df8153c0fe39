"""The embeddings: from the inputs of a model to the first layer.

A token's vector is the sum of its word, position and segment embeddings, then the norm with "post", then dropout.
Positions count from the first real token, holes inside included, and the first has row 2 of the table as in the
published checkpoints; so padding at either end changes nothing. With rotary positions, or none, there is no table, and
an input may have any length; the rotation for every layer's queries and keys is computed here.

Masked tokens are replaced by zeros, even if they hold NaN. A mask is never guessed from the ids: the padding id of one
task is a black pixel in another.
"""

from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nystrom.attention.mask_values import real_tokens
from nystrom.models.configuration import POSITION_OFFSET, EncoderConfig
from nystrom.models.design import EmbeddingTable, start_stds
from nystrom.models.parts.dropout import Dropout
from nystrom.models.parts.rotary import Rotation, rotation
from nystrom.parallel.models import count_positions_over_ranks
from nystrom.precision import accumulator, check_dtype
from nystrom.shapes import Group, row_per_token

# Advice in the error for an id outside its embedding table.
_WAYS_OUT = {
    "input_ids": "use the tokenizer that belongs to the model, or call model.resize_token_embeddings",
    "token_type_ids": "use fewer segment types, or make a model with a larger type_vocab_size",
    "position_ids": f"the first token has row {POSITION_OFFSET}; or make a model with a larger max_position_embeddings",
}


class EncoderEmbeddings(nn.Module):
    """Word, position and segment embeddings, and the checks of inputs."""

    group: Group = None  # Process group across which the tokens are split; None for a single process

    def __init__(self, config: EncoderConfig):
        super().__init__()
        width, self.longest, self.kind = config.hidden_size, config.longest_input, config.positions
        self._turn = partial(
            rotation,
            num_heads=config.num_attention_heads,
            head_dim=config.head_size,
            share=config.rotary_share,
            across_heads=config.rotary_across_heads,
        )
        words, table, segments = start_stds(config)
        self.word_embeddings: nn.Embedding = EmbeddingTable(
            config.vocab_size, width, std=words, padding_idx=config.pad_token_id
        )
        self.cls = nn.Parameter(torch.zeros(width)) if config.pooling == "cls" else None
        # A rank that holds a piece of the tokens does not know the place of the class token.
        self.over_ranks = self.cls is None
        rows = config.max_position_embeddings + POSITION_OFFSET + (self.cls is not None)
        self.position_embeddings = EmbeddingTable(rows, width, std=table) if self.kind == "learned" else None
        self.token_type_embeddings = EmbeddingTable(config.type_vocab_size, width, std=segments)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps) if config.norm == "post" else None
        self.dropout = Dropout(config.hidden_dropout_prob)

    def reset_parameters(self) -> None:
        """Initialise the class token at zero."""
        if self.cls is not None:
            nn.init.zeros_(self.cls)

    def _with_class(
        self, words: Float[Tensor, "b n w"], keep: Bool[Tensor, "b n"] | None, token_type_ids: Int[Tensor, "b n"] | None
    ) -> tuple[Float[Tensor, "b m w"], Bool[Tensor, "b m"] | None, Int[Tensor, "b m"] | None]:
        """Put the class token before the first real token of each sequence, if the model has one.

        Padding at either end then changes nothing. A sequence without real tokens has only the class token.
        """
        if self.cls is None:
            return words, keep, token_type_ids
        here = class_place(keep, words.shape[1], words.device)
        words = torch.where(here[..., None], self.cls.to(words.dtype), F.pad(words, (0, 0, 1, 0)))
        types = None if token_type_ids is None else torch.where(here, 0, F.pad(token_type_ids, (1, 0)))
        return words, with_class(keep), types

    def forward(
        self,
        words: Float[Tensor, "b n w"],
        keep: Bool[Tensor, "b n"] | None,
        token_type_ids: Int[Tensor, "b n"] | None,
        position_ids: Int[Tensor, "b n"] | None,
    ) -> tuple[Float[Tensor, "b m w"], Bool[Tensor, "b m"] | None, Rotation | None]:
        """Add the class token, positions and segments to the words, see `EncoderModel.forward`.

        Also returns the mask, with the class token, and the rotation of rotary positions.
        """
        for name, ids in (("token_type_ids", token_type_ids), ("position_ids", position_ids)):
            if ids is not None and (ids.ndim != 2 or ids.shape[1] != words.shape[1]):
                raise ValueError(
                    f"{name} has shape {tuple(ids.shape)}; expected (batch, tokens) = {tuple(words.shape[:2])}."
                )
        if position_ids is not None and self.kind == "none":
            raise ValueError("position_ids is a tensor, but positions is 'none': leave it out.")
        words, keep, token_type_ids = self._with_class(words, keep, token_type_ids)
        if token_type_ids is None:
            token_type_ids = torch.zeros(1, 1, dtype=torch.long, device=words.device)
        x, turn = words + look_up("token_type_ids", token_type_ids, self.token_type_embeddings), None
        if self.kind != "none":
            if position_ids is None and self.group is not None:
                position_ids = count_positions_over_ranks(self.group, words, keep, self.longest) + POSITION_OFFSET
            position_ids = count_positions(words, keep) if position_ids is None else position_ids
            if self.position_embeddings is None:
                turn = self._turn(position_ids - POSITION_OFFSET, dtype=accumulator(words.dtype))
            else:
                x = x + look_up("position_ids", position_ids, self.position_embeddings)
        x = x if keep is None else torch.where(keep[..., None], x, 0.0)
        return self.dropout(x if self.LayerNorm is None else self.LayerNorm(x)), keep, turn

    def words(
        self, input_ids: Int[Tensor, "b n"] | None, inputs_embeds: Float[Tensor, "b n w"] | None
    ) -> Float[Tensor, "b n w"]:
        """The word embeddings, looked up from ids or as given.

        Raises:
            ValueError: Both or neither are given, the rank or width is wrong, an id is outside of the table, or there
                are more tokens than positions.
        """
        if input_ids is not None and inputs_embeds is not None:
            raise ValueError("input_ids and inputs_embeds are both given; expected one of them.")
        if input_ids is not None:
            if input_ids.ndim != 2 or input_ids.is_floating_point():
                raise ValueError(
                    f"input_ids is {tuple(input_ids.shape)} of {input_ids.dtype}; expected token ids (batch, tokens): "
                    "add a batch axis to a single sequence."
                )
            name, words = "input_ids", look_up("input_ids", input_ids, self.word_embeddings)
        elif inputs_embeds is None:
            raise ValueError("neither input_ids nor inputs_embeds is given; expected one of them.")
        else:
            name, words = "inputs_embeds", inputs_embeds
            width = self.word_embeddings.embedding_dim
            if words.ndim != 3 or words.shape[2] != width:
                raise ValueError(f"{name} has shape {tuple(words.shape)}; expected (batch, tokens, {width}).")
            weight = self.word_embeddings.weight
            if torch.promote_types(words.dtype, weight.dtype) != weight.dtype:
                # Narrower ones become as wide as the weights where the embeddings are added.
                check_dtype(name, words, weight, of="model")
        if self.longest is not None and words.shape[1] > self.longest:
            raise ValueError(
                f"{name} holds {words.shape[1]} tokens, padding included, and the model has {self.longest} "
                f"positions: truncate it, or make a model with max_position_embeddings={words.shape[1]} or more, of a "
                f"trained one by `nystrom convert FOLDER --to OTHER --max-position-embeddings {words.shape[1]}`."
            )
        return words


def look_up(name: str, ids: Int[Tensor, "b n"], table: nn.Embedding) -> Float[Tensor, "b n w"]:
    """The rows of a table, by ids that the caller calls `name`.

    Raises:
        ValueError: An id is outside of the table; checked on the CPU, elsewhere torch raises its own error.
    """
    if torch.compiler.is_compiling():
        return table(ids)
    try:
        return table(ids)
    except IndexError as error:
        # Looked for only now, so that a call whose numbers fit pays nothing.
        largest, rows = int(ids.max()), table.num_embeddings
        wrong = largest if largest >= rows else int(ids.min())
        raise ValueError(
            f"{name} holds {wrong}; expected 0 to {rows - 1}, since its table has {rows} rows: {_WAYS_OUT[name]}."
        ) from error


def count_positions(words: Float[Tensor, "b n w"], keep: Bool[Tensor, "b n"] | None) -> Int[Tensor, "#b n"]:
    """The row of the position table for each token."""
    place = torch.arange(words.shape[1], device=words.device)[None]
    if keep is not None and not (isinstance(keep.shape[1], int) and keep.shape[1] == 0):
        # argmax gives the first of equal values, so the index of the first real token.
        place = (place - keep.int().argmax(dim=-1, keepdim=True)).clamp(min=0)
    return place + POSITION_OFFSET


def class_place(keep: Bool[Tensor, "b n"] | None, n: int, device: torch.device) -> Bool[Tensor, "#b m"]:
    """Position of the class token among n + 1 tokens: before the first real one."""
    first = 0 if keep is None or n == 0 else keep.int().argmax(dim=-1, keepdim=True)
    return torch.arange(n + 1, device=device)[None] == first


def with_class(keep: Bool[Tensor, "b n"] | None) -> Bool[Tensor, "b m"] | None:
    """The mask of n tokens with the class token added, which is real."""
    if keep is None:
        return None
    return F.pad(keep, (1, 0)) | class_place(keep, keep.shape[1], keep.device)


def check_mask(attention_mask: Tensor | None, words: Float[Tensor, "b n w"]) -> Bool[Tensor, "b n"] | None:
    """Turn transformers' attention mask, 1 or True for real tokens, into `keep`.

    Raises:
        ValueError: The rank or size is wrong, or the mask holds numbers other than 0 and 1.
    """
    if attention_mask is None:
        return None
    came = tuple(attention_mask.shape)
    if attention_mask.ndim != 2:
        way_out = row_per_token("attention_mask", attention_mask, words) or (
            "A causal mask or a bias per pair of tokens cannot be honoured in linear memory: use a model of "
            "transformers for it."
        )
        raise ValueError(f"attention_mask has shape {came}; expected (batch, tokens). {way_out}")
    if attention_mask.shape != words.shape[:2]:
        raise ValueError(
            f"attention_mask has shape {came} but the input holds {tuple(words.shape[:2])} tokens: "
            "pass one 0 or 1 per token."
        )
    return real_tokens("attention_mask", attention_mask)
