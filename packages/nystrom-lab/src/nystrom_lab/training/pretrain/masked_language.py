r"""The trainer of masked words and sentence order, whose instances are drawn anew in each pass.

The loss of a step is the mean over all masked words of its batch plus the mean over its instances. If the batch is
split into parts, across processes or by gradient accumulation, part p with $w_p$ of the W masked words and $b_p$ of the
B instances counts as $\frac{w_p}{W} \ell_p + \frac{b_p}{B} o_p$, so that the parts give the gradient of the whole
batch; the mean of the losses of the parts would not, since each has another number of masked words. If instances are
split across the N ranks of a group, a rank counts the masked words of its piece, and $b_p / N$ instances.

The best checkpoint is that of the lowest held-out loss. If the model is compiled, it is the encoder alone, with all
batches padded to one length: the number of masked tokens differs from batch to batch.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction, TrainingArguments

from nystrom.models.files.folder import copy_tokenizer
from nystrom.models.heads.language import EncoderForPreTraining
from nystrom.models.heads.losses import IGNORED
from nystrom_lab.data.language.mlm_sop.dataset import MlmSop
from nystrom_lab.training.compiling import compile_module
from nystrom_lab.training.pretrain.data import HeldOutInstances, InstanceOrder
from nystrom_lab.training.pretrain.pretrain_settings import PretrainingSettings
from nystrom_lab.training.pretrain.scores import STUDY, Scores, score_batch, score_rows, sum_up, summary
from nystrom_lab.training.results import Provenance, result_row
from nystrom_lab.training.run_folder import RunFolder
from nystrom_lab.training.run_progress import logged_with
from nystrom_lab.training.run_trainer import RunResults, RunTrainer

QUANTITIES = logged_with(
    eval_mlm_loss="validation MLM loss",
    eval_mlm_accuracy="validation MLM accuracy",
    eval_perplexity="validation perplexity",
    eval_sop_loss="validation SOP loss",
    eval_sop_accuracy="validation SOP accuracy",
)


class PretrainingTrainer(RunTrainer[PretrainingSettings]):
    """Trains one model on masked words and sentence order, in one run folder."""

    def __init__(
        self,
        model: EncoderForPreTraining,
        arguments: TrainingArguments,
        *,
        settings: PretrainingSettings,
        train: MlmSop,
        held_out: HeldOutInstances,
        run: RunFolder,
    ):
        self.scored = model
        collate = train.collate
        if settings.compile:
            collate = partial(collate, length=settings.length)
            compile_module(model.nystromformer)
        super().__init__(
            model,
            arguments,
            settings=settings,
            train=train,
            validation=held_out,
            collate=collate,
            run=run,
            quantities=QUANTITIES,
            compute_metrics=_metrics,
        )
        # The Trainer counts the masked words of a step, and leaves the scaling of the loss to `compute_loss`.
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga = True

    def get_train_dataloader(self) -> DataLoader:
        """The batches of the whole run; each process takes its share of every batch."""
        return self._whole_run(self.train_samples, partial(InstanceOrder, self.train_samples))

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *_: Any, num_items_in_batch: Any = None, **__: Any
    ) -> Any:
        """The contribution of one part to the loss of a step."""
        assert num_items_in_batch is not None, "the Trainer counts the labels of a step"
        outputs = model(**inputs)
        here = (inputs["labels"] != IGNORED).sum()
        words = here / torch.as_tensor(num_items_in_batch, device=here.device).clamp(min=1)
        instances = len(inputs["labels"]) / (self.settings.batch_size * self.settings.context_parallel)
        # Gradients are averaged over the processes.
        return (words * outputs.prediction_loss + instances * outputs.sop_loss) * self.args.world_size

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        """Score the instances of a batch."""
        batch = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            return None, score_batch(self.scored, batch), batch["sentence_order_label"]

    def selection(self, metrics: Mapping[str, float]) -> float:
        """The value that selects the best checkpoint."""
        return -metrics["eval_loss"]

    def score_best(self, step: int) -> tuple[Any, Any]:
        """The best model, and the scores of its evaluation."""
        logged = self.logged_at(step)
        values: dict[str, Any] = {name: logged[f"eval_{name}"] for name in Scores._fields}
        return EncoderForPreTraining.from_pretrained(self.run.checkpoint(step)), Scores(**values)

    def save_best(self, model: Any, folder: Path) -> None:
        """Save the best model with the tokenizer of the data."""
        super().save_best(model, folder)
        copy_tokenizer(Path(self.settings.data), folder, max_length=model.config.max_position_embeddings)

    def results(self, model: Any, scores: Any, command: str) -> RunResults:
        """The scores on held-out documents."""
        settings = self.settings
        # Facts that distinguish runs: the preset, the model that a run starts from, and the training.
        facts = {
            "preset": settings.preset,
            "model": settings.model and str(settings.model),
            "fingerprint": settings.fingerprint,
            "steps": settings.steps,
            "batch": settings.batch_size,
            "lr": settings.learning_rate,
        }
        provenance = Provenance(settings.device, settings.precision, settings.seed, facts, command)
        rows = score_rows(model.config, scores, provenance, length=settings.length)
        text = f"{summary(scores)}; best after step {self.state.best_global_step} of {settings.steps}"
        return RunResults(
            rows, partial(result_row, model.config, provenance=provenance, study=STUDY), text, self.run.drawn
        )


def _metrics(prediction: EvalPrediction) -> dict[str, float]:
    scores = sum_up(np.asarray(prediction.predictions, dtype=np.float64))
    return {**scores._asdict(), "loss": scores.mlm_loss + scores.sop_loss}
