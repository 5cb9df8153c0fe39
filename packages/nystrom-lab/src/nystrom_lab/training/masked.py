r"""The trainer of encoders that learn to predict masked tokens of a task's own inputs.

The masked tokens (`nystrom_lab.training.batches`) get one learned vector in place of their embedding, and a
head predicts them from the last hidden states. With M the masked tokens of a sequence,
$$\ell = \frac{1}{b} \sum_{s} \frac{1}{|M_s|} \sum_{i \in M_s} -\log p_s(x_i),$$
so that gradient accumulation gives the gradient of the whole batch. Vector and head are those of
`nystrom_lab.training.denoising`, and are not part of the saved model. Neither classes nor the test split
are read.

The tokens that an evaluation masks are the same in all evaluations, of all runs. The best checkpoint has the
smallest validation loss.

Source: Amos et al. (2023), arXiv:2310.02980, its masked objective.
Departs from it: a vector rather than a symbol of the vocabulary, since pictures use all of theirs.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction

from nystrom.models import EncoderModel
from nystrom.parallel.agreement import check_group
from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.training.arena import EncoderTrainer
from nystrom_lab.training.batches import AugmentedSplit, masking, shortest_first, unmasked
from nystrom_lab.training.denoising import Denoiser
from nystrom_lab.training.results import result_row
from nystrom_lab.training.run_progress import logged_with
from nystrom_lab.training.run_trainer import RunResults
from nystrom_lab.training.tasks import find_task

ACCURACY, LOSS = "validation masked accuracy", "validation loss"


class MaskedTrainer(EncoderTrainer):
    """Trains one encoder to predict masked tokens of a task's own inputs."""

    logged = logged_with(eval_accuracy=ACCURACY)

    @property
    def words(self) -> int:
        """Tokens of the vocabulary."""
        return LRA[self.settings.task].vocab_size

    @property
    def denoiser(self) -> Denoiser:
        """The vector that masks a token, and the head that predicts it."""
        denoiser = self.network.denoiser
        assert isinstance(denoiser, Denoiser)
        return denoiser

    def get_train_dataloader(self) -> DataLoader:
        """The batches of the whole run, masked anew in each pass over the data."""
        vary = find_task(self.settings.task).vary if self.settings.augment else None
        return self.varied_loader(masking(self.settings.mask_share, self.words, after=vary))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """The validation split, always with the same tokens masked."""
        masked = AugmentedSplit(self.splits.val, masking(self.settings.mask_share, self.words), seed=0)
        return self._loader(masked, shortest_first(self.splits.val.lengths), self.args.eval_batch_size)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        """The mean over the sequences of the mean loss of their masked tokens."""
        return self.denoiser.loss(*self._encode(model, inputs), group=self.network.group)

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        """For each sample its loss, the number of its masked tokens that are predicted, and the number of them all."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            x, ids, masked = self._encode(model, inputs)
            losses, right = self.denoiser.scores(x, ids, masked, group=self.network.group)
            scores = torch.stack([losses.double(), right.double(), masked.sum(dim=1).double()], dim=1)
            if self.network.group is not None:
                scores = check_group(self.network.group).sum(scores)
        # The documents of a pair follow each other.
        return None, scores.view(len(inputs["labels"]), -1, 3).sum(dim=1), inputs["labels"]

    def _encode(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The last hidden states of a batch, its clean tokens, and which were masked."""
        ids, masked = unmasked(inputs["input_ids"].flatten(0, -2), self.words)
        keep, words = inputs.get("attention_mask"), self.network.get_input_embeddings()
        assert isinstance(words, nn.Embedding)
        keep = None if keep is None else keep.flatten(0, -2)
        outputs = model(inputs_embeds=self.denoiser.masked(ids, masked, words), attention_mask=keep)
        # Without the token of the class, where the model has it: batches are padded at their end.
        return outputs.last_hidden_state[:, -ids.shape[1] :], ids, masked

    def selection(self, metrics: Mapping[str, float]) -> float:
        """The value that selects the best checkpoint."""
        return -metrics["eval_loss"]

    def judge(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        """The scores as they are."""
        return logits

    def sum_up(self, prediction: EvalPrediction) -> dict[str, float]:
        """The mean loss of a sequence, and the share of the masked tokens that are predicted."""
        losses, right, masked = np.asarray(prediction.predictions).T
        documents = LRA[self.settings.task].documents
        return {"loss": float(losses.mean() / documents), "accuracy": float(right.sum() / masked.sum())}

    def score_best(self, step: int) -> tuple[Any, Any]:
        """The best encoder, and what its evaluation found."""
        return EncoderModel.from_pretrained(self.run.checkpoint(step)), self.logged_at(step)

    def results(self, model: Any, scores: Any, command: str) -> RunResults:
        """The share of the masked tokens that are predicted, and the loss."""
        samples, values = len(self.splits.val), {ACCURACY: scores["eval_accuracy"], LOSS: scores["eval_loss"]}
        row = partial(
            result_row, model.config, provenance=self.provenance(command), study=f"pretrain {self.settings.task}"
        )
        text = (
            f"of the masked tokens of {samples} validation samples {values[ACCURACY]:.1%} are predicted, loss "
            f"{values[LOSS]:.4g}; best after step {self.state.best_global_step}"
        )
        rows = [row(name, value, "", repeats=samples) for name, value in values.items()]
        return RunResults(rows, row, text, self.run.drawn)
