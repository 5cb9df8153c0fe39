"""Fill in the masked words of texts.

Each mask of a line is filled separately, while the others stay masked, and its words come with their probability over
the whole vocabulary. Lines are read, encoded and filled in batches, and words are scored only at the masks, so memory
depends on the batch size and not on the number of lines. Padding changes nothing.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from nystrom.checks import check_at_least, check_choice
from nystrom.evaluation import evaluating
from nystrom.models.files.tokenizer import load_tokenizer
from nystrom.models.heads.language import EncoderForMaskedLM
from nystrom.precision import at_least_float32

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class Filling:
    """One word for one mask.

    Attributes:
        line: Number of the text, from 1; empty lines count.
        mask: Number of the mask in it, from 1.
        rank: 1 for the most probable word.
        token: The word, or part of one.
        token_id: Its number in the vocabulary.
        probability: Its probability at this mask.
        text: The text with this mask filled.
    """

    line: int
    mask: int
    rank: int
    token: str
    token_id: int
    probability: float
    text: str


def fill_mask(
    texts: str | Iterable[str],
    *,
    model: EncoderForMaskedLM | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    top_k: int = 5,
    batch_size: int = 16,
    device: Device = "auto",
) -> list[Filling]:
    """Fill in masked words: `fill_mask("Paris is the [MASK] of France.", model=folder)`.

    Args:
        texts: A text, or several; each non-empty text contains the tokenizer's mask at least once.
        model: The model, which stays on its device, or its folder.
        tokenizer: Its tokenizer; None loads the one in the folder.
        top_k: Words per mask.
        batch_size: Texts per batch; affects only speed and memory.
        device: Device for a model from a folder; "auto" uses a GPU if there is one.

    Returns:
        The words, by text, mask and rank.

    Raises:
        ValueError: A text without a mask or longer than the model's positions, named by its number; a folder that
            cannot be loaded; or invalid arguments.
    """
    lines = [texts] if isinstance(texts, str) else texts
    filler = MaskFiller(model, tokenizer=tokenizer, top_k=top_k, batch_size=batch_size, device=device)
    return list(filler.fill(lines))


class _Encoded(NamedTuple):
    number: int
    line: str
    ids: Int[Tensor, " n"]


class MaskFiller:
    """A model with its tokenizer, for a stream of texts; the arguments are those of `fill_mask`."""

    def __init__(
        self,
        model: EncoderForMaskedLM | str | Path,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        top_k: int = 5,
        batch_size: int = 16,
        device: Device = "auto",
    ):
        check_at_least("top_k", top_k, 1)
        check_at_least("batch_size", batch_size, 1)
        chosen = _usable(device)
        if isinstance(model, str | Path):
            self.model: EncoderForMaskedLM = EncoderForMaskedLM.from_pretrained(model).to(chosen)
            self.tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
        else:
            if tokenizer is None:
                raise ValueError("tokenizer is None, but model is not a folder that could hold one: pass both.")
            self.tokenizer, self.model = tokenizer, model
        self.top_k, self.batch_size = top_k, batch_size
        words, known = len(self.tokenizer), self.model.config.vocab_size
        if self.tokenizer.mask_token is None:
            raise ValueError("the tokenizer has no mask token: it does not belong to a masked language model.")
        if words > known:
            raise ValueError(f"the tokenizer has {words} tokens but the model {known}: they do not belong together.")
        if top_k > known:
            raise ValueError(f"top_k is {top_k} but the model has {known} tokens.")

    def check(self, lines: Iterable[str]) -> int:
        """Count lines, without encoding them.

        Raises:
            ValueError: A line has words but no mask; the message gives its number.
        """
        count = 0
        for count, line in enumerate(lines, start=1):
            self._check_line(count, line)
        return count

    def fill(self, lines: Iterable[str]) -> Iterator[Filling]:
        """Fill a stream of lines; empty lines are counted but give nothing.

        Raises:
            ValueError: A line has no mask, or more tokens than the model has positions; the message gives its number.
                The lines before it have been filled by then.
        """
        batch: list[_Encoded] = []
        for number, line in enumerate(lines, start=1):
            try:
                asked = self._check_line(number, line) and self._encode(number, line.strip())
            except ValueError:
                yield from self._fill_batch(batch)
                raise
            if asked:
                batch.append(asked)
            if len(batch) == self.batch_size:
                yield from self._fill_batch(batch)
                batch = []
        yield from self._fill_batch(batch)

    def _check_line(self, number: int, line: str) -> bool:
        """Whether a line has a mask to fill."""
        mask = self.tokenizer.mask_token
        assert isinstance(mask, str), "checked when the filler was made"
        if line.strip() and mask not in line:
            raise ValueError(
                f"line {number} holds no {mask}: {line.strip()[:60]!r}; write {mask} for a word to fill in."
            )
        return bool(line.strip())

    def _encode(self, number: int, line: str) -> _Encoded:
        ids = torch.tensor(self.tokenizer(line, verbose=False)["input_ids"])
        most = self.model.config.longest_input
        if most is not None and len(ids) > most:
            raise ValueError(f"line {number} holds {len(ids)} tokens and the model has {most} positions: shorten it.")
        return _Encoded(number, line, ids)

    @torch.inference_mode()
    def _fill_batch(self, batch: list[_Encoded]) -> list[Filling]:
        if not batch:
            return []
        ids = pad_sequence([entry.ids for entry in batch], batch_first=True)
        keep = pad_sequence([torch.ones_like(entry.ids, dtype=torch.bool) for entry in batch], batch_first=True)
        rows, places = ((ids == self.tokenizer.mask_token_id) & keep).nonzero(as_tuple=True)
        top = self._probabilities(ids, keep, rows, places).topk(self.top_k)
        count: Counter[int] = Counter()
        fillings = []
        for row, chances, words in zip(rows.tolist(), top.values.tolist(), top.indices.tolist(), strict=True):
            count[row] += 1
            for rank, (chance, word) in enumerate(zip(chances, words, strict=True), start=1):
                token = str(self.tokenizer.decode([word])).strip()
                text = self._put(batch[row].line, count[row], token)
                fillings.append(Filling(batch[row].number, count[row], rank, token, word, chance, text))
        return fillings

    def _probabilities(
        self,
        ids: Int[Tensor, "b n"],
        keep: Bool[Tensor, "b n"],
        rows: Int[Tensor, " masks"],
        places: Int[Tensor, " masks"],
    ) -> Float[Tensor, "masks v"]:
        model, device = self.model, self.model.device
        with evaluating(model):
            x = model.nystromformer(ids.to(device), attention_mask=keep.to(device)).last_hidden_state
            logits = model.cls(x[rows.to(device), places.to(device)])
        return at_least_float32(logits).softmax(dim=-1).cpu()

    def _put(self, line: str, mask_number: int, token: str) -> str:
        """The line with the word in place of one of its masks."""
        mask = self.tokenizer.mask_token
        assert isinstance(mask, str), "checked when the filler was made"
        parts = line.split(mask)
        return mask.join(parts[:mask_number]) + token + mask.join(parts[mask_number:])


def _usable(device: str) -> str:
    check_choice("device", device, get_args(Device))
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds none here: use 'cpu' or 'auto'.")
    return device
