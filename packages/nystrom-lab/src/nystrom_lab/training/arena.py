"""The trainers of runs on a task, for classes and for masked tokens.

- The best checkpoint is chosen by validation accuracy, after the share of the steps that the preset says.
- Samples are augmented, inputs denoised and weights averaged if the settings say so (`nystrom_lab.training.batches`,
  `nystrom_lab.training.denoising`, `nystrom_lab.training.weight_mean`).
- A compiled model gets batches of one shape, see `nystrom_lab.training.compiling`.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    EvalPrediction,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from nystrom.models import EncoderModel
from nystrom.parallel import parallelize
from nystrom.parallel.agreement import check_group
from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.data.store.split import Split
from nystrom_lab.training.batches import AugmentedSplit, PassOrder, Vary, masking, shortest_first, unmasked
from nystrom_lab.training.denoising import Denoiser
from nystrom_lab.training.results import Place, accuracy_row, result_row, setting_facts
from nystrom_lab.training.run_folder import RunFolder, written
from nystrom_lab.training.run_progress import QUANTITIES
from nystrom_lab.training.run_settings import Settings
from nystrom_lab.training.run_trainer import RunResults, RunTrainer
from nystrom_lab.training.scoring import accuracy, is_right, load_model
from nystrom_lab.training.tasks import (
    Model,
    Splits,
    find_task,
)
from nystrom_lab.training.weight_mean import WeightMean, load_mean

ACCURACY, LOSS = "validation masked accuracy", "validation loss"


class EncoderTrainer(RunTrainer):
    """Trains one model by settings, in one run folder.

    Args:
        model: The model.
        arguments: From `training_arguments`.
        settings: Settings of the run.
        splits: Data.
        run: The folder.
    """

    # What is logged, and its name in the curves and lines.
    logged = QUANTITIES

    def __init__(
        self,
        model: Model | EncoderModel,
        arguments: TrainingArguments,
        *,
        settings: Settings,
        splits: Splits,
        run: RunFolder,
    ):
        self.chosen, self.splits = settings, splits
        if settings.denoise or settings.mask_share:
            model.denoiser = Denoiser(model.config)
            model.denoiser.apply(model._init_weights)
        extent = {"length" if settings.compile else "most": settings.longest}
        collate = partial(find_task(settings.task).collate, **extent)
        if settings.compile:
            from nystrom_lab.training.compiling import compile_model

            compile_model(model)
        super().__init__(
            model,
            arguments,
            settings=settings,
            train=splits.train,
            validation=splits.val,
            collate=collate,
            run=run,
            clip_value=settings.base.clip_value,
            quantities=self.logged,
            compute_metrics=self.sum_up,
            preprocess_logits_for_metrics=self.judge,
        )
        self.mean = WeightMean(model, settings.ema) if settings.ema else None
        if self.mean is not None:
            self.add_callback(_AfterStep(self.mean))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The mean cross entropy, in training with smoothed labels and the loss of the tokens if the run has them."""
        smoothing, weight = self.chosen.label_smoothing, self.chosen.denoise
        if not model.training or not (smoothing or weight):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if weight:
            outputs, of_tokens = self._denoise(model, inputs)
        else:
            outputs, of_tokens = model(**inputs), 0.0
        loss = F.cross_entropy(outputs.logits.float(), inputs["labels"], label_smoothing=smoothing)
        loss = loss + weight * of_tokens
        return (loss, outputs) if return_outputs else loss

    def _denoise(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        """The output for a corrupted input, and the loss of its tokens."""
        denoiser, words = self.network.denoiser, self.network.get_input_embeddings()
        assert isinstance(denoiser, Denoiser)
        assert isinstance(words, nn.Embedding)
        ids, keep = inputs["input_ids"], inputs.get("attention_mask")
        corrupted = denoiser.corrupt(ids, keep, words)
        outputs = model(inputs_embeds=corrupted, attention_mask=keep, output_hidden_states=True)
        # The documents of a pair follow each other.
        ids = ids.flatten(0, -2)
        keep = None if keep is None else keep.flatten(0, -2)
        x = outputs.hidden_states[-1]
        # Behind a class token, where the model has one.
        x = x[:, x.shape[1] - ids.shape[1] :]
        return outputs, denoiser.loss(x, ids, keep, group=self.network.group)

    def get_train_dataloader(self) -> DataLoader:
        """The batches of the whole run, with samples augmented if the run does so."""
        if not self.chosen.augment:
            return super().get_train_dataloader()
        return self.varied_loader(find_task(self.chosen.task).vary)

    def varied_loader(self, vary: Vary) -> DataLoader:
        """The batches of the whole run, with samples augmented anew in each pass."""
        settings, samples = self.chosen, self.splits.train
        order = PassOrder(samples.lengths, batch_size=settings.batch_size, steps=settings.steps, seed=settings.seed)
        return self._loader(AugmentedSplit(samples, vary, seed=settings.seed), order, settings.part_size)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint, with the mean of the weights if there is one."""
        super()._save_checkpoint(model, trial)
        if self.mean is not None and self.is_world_process_zero():
            folder = self.run.unfinished / self.run.checkpoint(self.state.global_step).name
            with written(folder, self.remedy()):
                self.mean.save(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Read a checkpoint, with the mean of the weights if there is one."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.mean is not None:
            self.mean.load(Path(resume_from_checkpoint))

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate on the validation split, and add the value that selects the best checkpoint."""
        with nullcontext() if self.mean is None else self.mean.in_place():
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        return {**metrics, "eval_selection": self.selection(metrics)}

    def selection(self, metrics: Mapping[str, float]) -> float:
        """The value that selects the best checkpoint."""
        counts = self.state.global_step > self.chosen.base.best_after * self.settings.steps
        return metrics["eval_accuracy"] if counts else -1.0

    def judge(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        """For each sample, whether it is classified correctly, and its loss."""
        return is_right(logits, labels), F.cross_entropy(logits.float(), labels, reduction="none")

    def sum_up(self, prediction: EvalPrediction) -> dict[str, float]:
        """Means over the samples; the Trainer's own loss also counts what fills the last batch of several processes."""
        right, losses = tuple(prediction.predictions)
        return {"accuracy": float(np.mean(right)), "loss": float(np.mean(losses))}

    def score_best(self, step: int) -> tuple[Any, Any]:
        """The best model, and its accuracy on the test split."""
        settings, test = self.chosen, self._test()
        task, best = (
            find_task(settings.task),
            load_model(self.run.checkpoint(step), settings.task, classes=test.classes),
        )
        if settings.ema:
            load_mean(best, self.run.checkpoint(step))
        if self.pieces is not None:
            parallelize(best, self.pieces.tokens)
            task = replace(task, collate=self.pieces.collate(task.collate))
        share = accuracy(
            best, test, task, batch_size=settings.part_size, device=settings.device, precision=settings.precision
        )
        return best, share

    def results(self, model: Any, scores: Any, command: str) -> RunResults:
        """The accuracies on the test and validation splits, and those of guesses without a model."""
        settings, test, val, reached = self.chosen, self._test(), self.splits.val, self.state.best_metric
        assert reached is not None, "the last step is evaluated"
        guesses, guess = {"largest class": test.majority_share}, find_task(settings.task).guess
        if guess is not None:
            guesses[guess.name] = guess.share(self.splits.train, test)
        place = self.place(command)
        rows = [
            accuracy_row(model.config, "test accuracy", scores, len(test), place),
            accuracy_row(model.config, "validation accuracy", reached, len(val), place),
            *(result_row(model.config, f"{name} of test", told, "", place) for name, told in guesses.items()),
        ]
        beside = ", ".join(f"{name} {told:.1%}" for name, told in guesses.items())
        text = (
            f"test accuracy {scores:.1%} ({rows[0].low:.1%} to {rows[0].high:.1%} on {len(test)} samples), {beside}; "
            f"best after step {self.state.best_global_step} with validation accuracy {reached:.1%}"
        )
        return RunResults(rows, partial(result_row, model.config, place=place), text, self.run.drawn)

    def place(self, command: str) -> Place:
        """Where its results are measured."""
        settings = self.chosen
        return Place(settings.device, settings.precision, settings.seed, setting_facts(settings), command)

    def _test(self) -> Split:
        assert self.splits.test is not None, "a run that classifies opens the test split"
        return self.splits.test


class _AfterStep(TrainerCallback):
    def __init__(self, mean: WeightMean):
        self.mean = mean

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.mean.update(state.global_step)


class MaskedTrainer(EncoderTrainer):
    r"""Trains one encoder to predict masked tokens of a task's own inputs.

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

    logged: Mapping[str, str] = {
        "loss": "train loss",
        "eval_loss": LOSS,
        "eval_accuracy": ACCURACY,
        "learning_rate": "learning rate",
        "grad_norm": "gradient norm",
    }

    @property
    def words(self) -> int:
        """Tokens of the vocabulary."""
        return LRA[self.chosen.task].vocab_size

    @property
    def denoiser(self) -> Denoiser:
        """The vector that masks a token, and the head that predicts it."""
        denoiser = self.network.denoiser
        assert isinstance(denoiser, Denoiser)
        return denoiser

    def get_train_dataloader(self) -> DataLoader:
        """The batches of the whole run, masked anew in each pass over the data."""
        vary = find_task(self.chosen.task).vary if self.chosen.augment else None
        return self.varied_loader(masking(self.chosen.mask_share, self.words, after=vary))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """The validation split, always with the same tokens masked."""
        masked = AugmentedSplit(self.splits.val, masking(self.chosen.mask_share, self.words), seed=0)
        return self._loader(masked, shortest_first(self.splits.val.lengths), self.args.eval_batch_size)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The mean over the sequences of the mean loss of their masked tokens."""
        assert not return_outputs, "evaluation scores each sequence"
        return self.denoiser.loss(*self._encode(model, inputs), group=self.network.group)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
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
        documents = LRA[self.chosen.task].documents
        return {"loss": float(losses.mean() / documents), "accuracy": float(right.sum() / masked.sum())}

    def score_best(self, step: int) -> tuple[Any, Any]:
        """The best encoder, and what its evaluation found."""
        best = EncoderModel.from_pretrained(self.run.checkpoint(step))
        if self.chosen.ema:
            load_mean(best, self.run.checkpoint(step))
        return best, self.logged_at(step)

    def results(self, model: Any, scores: Any, command: str) -> RunResults:
        """The share of the masked tokens that are predicted, and the loss."""
        samples, found = len(self.splits.val), {ACCURACY: scores["eval_accuracy"], LOSS: scores["eval_loss"]}
        row = partial(result_row, model.config, place=self.place(command), study=f"pretrain {self.chosen.task}")
        text = (
            f"of the masked tokens of {samples} validation samples {found[ACCURACY]:.1%} are predicted, loss "
            f"{found[LOSS]:.4g}; best after step {self.state.best_global_step}"
        )
        rows = [row(name, value, "", repeats=samples) for name, value in found.items()]
        return RunResults(rows, row, text, self.run.drawn)
