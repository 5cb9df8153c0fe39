r"""A run on masked words and sentence order, whose instances are drawn anew in each pass, from top to bottom.

The loss of a step is the mean over all masked words of its batch plus the mean over its instances. If the batch is
split into parts, across processes or by gradient accumulation, part p with $w_p$ of the W masked words and $b_p$ of the
B instances counts as $\frac{w_p}{W} \ell_p + \frac{b_p}{B} o_p$, so that the parts give the gradient of the whole
batch; the mean of the losses of the parts would not, since each has another number of masked words. If instances are
split across the N ranks of a group, a rank counts the masked words of its piece, and $b_p / N$ instances.

The best checkpoint is that of the lowest held-out loss. If the model is compiled, it is the encoder alone, with all
batches padded to one length: the number of masked tokens differs from batch to batch.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction, TrainingArguments, set_seed

from nystrom.attention.backend import check_backend_device
from nystrom.checks import check_at_least
from nystrom.models import EncoderConfig
from nystrom.models.files.folder import copy_tokenizer
from nystrom.models.heads.language import EncoderForPreTraining
from nystrom.models.heads.losses import IGNORED
from nystrom_lab.config import EvaluatePretrainedOptions, PretrainOptions, command_line
from nystrom_lab.data.language.mlm_sop.dataset import MlmSop
from nystrom_lab.data.store.header import read_header
from nystrom_lab.data.store.prepared_folder import verify
from nystrom_lab.measure.memory import check_memory
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.additions.compiling import check_compiler, compile_module
from nystrom_lab.training.hardware import is_main
from nystrom_lab.training.pretrain.data import HeldOutInstances, InstanceOrder, open_instances
from nystrom_lab.training.pretrain.presets import PretrainingPreset
from nystrom_lab.training.pretrain.pretrain_settings import PretrainingSettings, settle
from nystrom_lab.training.pretrain.scores import Scores, score_batch, score_model, sum_up
from nystrom_lab.training.pretrain.source import check_vocabulary, describe, encoder_config, find_source, start_model
from nystrom_lab.training.ranks.lost import leaving_the_group
from nystrom_lab.training.ranks.pieces import check_pieces
from nystrom_lab.training.results import Place, result_row, wilson
from nystrom_lab.training.run.folder import RunFolder
from nystrom_lab.training.run.progress import no_file_bars
from nystrom_lab.training.run.run_trainer import RunResults, RunTrainer, run_to_the_end, training_arguments

STUDY = "pretrain mlm-sop"
# What is logged, and its name in the curves and lines.
QUANTITIES = {
    "loss": "train loss",
    "eval_loss": "validation loss",
    "eval_mlm_loss": "validation MLM loss",
    "eval_mlm_accuracy": "validation MLM accuracy",
    "eval_perplexity": "validation perplexity",
    "eval_sop_loss": "validation SOP loss",
    "eval_sop_accuracy": "validation SOP accuracy",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
}


@leaving_the_group
def pretrain_model(base: PretrainingPreset, run: RunFolder, asked: PretrainOptions, *, words: Sequence[str]) -> None:
    """Pretrain; see `nystrom_lab.training.pretrain.pretrain.pretrain`.

    Args:
        base: The preset.
        run: The folder of the run.
        asked: The requested options, with device and precision already resolved from "auto".
        words: The command that reproduces the run, after `nystrom`.

    Raises:
        ValueError: An invalid setting, data set or model, or a missing compiler.
        FloatingPointError: The loss or a weight is no longer finite.
        OSError: A file could not be written; the message names the folder and how to continue.
    """
    data = Path(asked.data)
    source = None if asked.model is None else find_source(Path(asked.model))
    settings = settle(base, source, asked)
    train, held_out = open_instances(
        data,
        length=settings.length,
        seed=settings.seed,
        instances=settings.instances,
        batch_size=settings.batch_size,
    )
    vocabulary = train.vocabulary
    if source is not None:
        check_vocabulary(source, data, vocabulary)
    preset_fields = {"hidden_act": base.hidden_act, "initializer_range": base.initializer_range}
    check_memory(
        layers=settings.num_hidden_layers,
        width=settings.hidden_size,
        intermediate=settings.intermediate_size,
        vocabulary=vocabulary.size,
        # Weights, gradients and the two means of AdamW.
        numbers=4,
    )
    # Unknown options, and sizes that do not fit each other, are found here.
    config = encoder_config(settings, preset_fields, vocabulary)
    check_pieces(asked.context_parallel, lambda: EncoderForPreTraining(config), compile=settings.compile)
    check_backend_device(settings.options.get("backend", "auto"), torch.device(settings.device))
    if settings.compile:
        check_compiler(settings.device)
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    with run.held(settings, resume=asked.resume, main=is_main()):
        fingerprint = hashlib.sha256(json.dumps(read_header(data)["files"], sort_keys=True).encode()).hexdigest()[:16]
        run.check_data(fingerprint)
        if run.is_done(resume=asked.resume):
            return
        arguments = training_arguments(settings, base, run, adam_epsilon=base.adam_epsilon, workers=asked.workers)
        set_seed(settings.seed)
        with no_file_bars():
            if source is None:
                network, new = EncoderForPreTraining(config), []
            else:
                network, new = start_model(settings, source)
            if is_main():
                run.start(settings, folder=str(data.resolve()), fingerprint=fingerprint)
                if source is not None:
                    print(f"{describe(source, settings, new)}.", flush=True)
                print(_summary(network, settings, train, held_out), flush=True)
            # What the model was made of must not decide what is drawn in training.
            set_seed(settings.seed)
            trainer = PretrainingTrainer(network, arguments, settings=settings, train=train, held_out=held_out, run=run)
            run_to_the_end(trainer, resume=asked.resume, command=command_line(words, settings.processes))


def _summary(
    model: EncoderForPreTraining, settings: PretrainingSettings, train: MlmSop, held_out: HeldOutInstances
) -> str:
    """The model and the data in one line."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"{settings.attention}, {settings.num_hidden_layers} layers x {settings.hidden_size}, {parameters:,} "
        f"parameters; {train.documents:,} documents, {train.tokens:,} tokens, {len(train):,} instances of "
        f"{settings.length} tokens in an epoch, {len(held_out):,} of {len(held_out.data):,} held-out instances scored"
    )


class PretrainingTrainer(RunTrainer):
    """Trains one model on masked words and sentence order, in one run folder.

    Args:
        model: The model.
        arguments: From `training_arguments`.
        settings: Settings of the run.
        train: Training instances.
        held_out: Held-out instances.
        run: The folder.
    """

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
        self.instances, self.scored, self.chosen = train, model, settings
        collate = train.collate
        if settings.compile:
            collate = partial(collate, length=settings.length)
            compile_module(model.nystromformer)
        super().__init__(
            model,
            arguments,
            settings=settings,
            train=train,  # pyright: ignore[reportArgumentType] (its lengths are those of an epoch)
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
        settings = self.settings
        order = InstanceOrder(self.instances, batch_size=settings.batch_size, steps=settings.steps, seed=settings.seed)
        return self._loader(self.train_dataset, order, settings.part_size)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The contribution of one part to the loss of a step."""
        assert num_items_in_batch is not None, "the Trainer counts the labels of a step"
        outputs = model(**inputs)
        here = (inputs["labels"] != IGNORED).sum()
        words = here / torch.as_tensor(num_items_in_batch, device=here.device).clamp(min=1)
        instances = len(inputs["labels"]) / (self.settings.batch_size * self.settings.context_parallel)
        # Gradients are averaged over the processes.
        loss = (words * outputs.prediction_loss + instances * outputs.sop_loss) * self.args.world_size
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Score the instances of a batch."""
        batch = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            return None, score_batch(self.scored, batch), batch["sentence_order_label"]

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate on the held-out instances, and name the metric that chooses the best checkpoint."""
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        return {**metrics, "eval_selection": -metrics["eval_loss"]}

    def score_best(self, step: int) -> tuple[Any, Any]:
        """The best model, and the scores of its evaluation."""
        logged = self.logged_at(step)
        values: dict[str, Any] = {name: logged[f"eval_{name}"] for name in Scores._fields}
        return EncoderForPreTraining.from_pretrained(self.run.checkpoint(step)), Scores(**values)

    def save_best(self, model: Any, folder: Path) -> None:
        """Save the best model with the tokenizer of the data."""
        super().save_best(model, folder)
        copy_tokenizer(Path(self.chosen.data), folder, max_length=model.config.max_position_embeddings)

    def results(self, model: Any, scores: Any, command: str) -> RunResults:
        """The scores on held-out documents."""
        settings = self.chosen
        # What distinguishes runs: the preset, the model that it starts from, and the training.
        facts = {
            "preset": settings.preset,
            "model": settings.model and str(settings.model),
            "steps": settings.steps,
            "batch": settings.batch_size,
            "lr": settings.learning_rate,
        }
        place = Place(settings.device, settings.precision, settings.seed, facts, command)
        rows = score_rows(model.config, scores, place, length=settings.length)
        text = f"{summary(scores)}; best after step {self.state.best_global_step} of {settings.steps}"
        return RunResults(rows, partial(result_row, model.config, place=place, study=STUDY), text, self.run.drawn)


def _metrics(prediction: EvalPrediction) -> dict[str, float]:
    scores = sum_up(np.asarray(prediction.predictions, dtype=np.float64))
    return {**scores._asdict(), "loss": scores.mlm_loss + scores.sop_loss}


def score_folder(asked: EvaluatePretrainedOptions) -> list[Row]:
    """Score a saved model; see `nystrom_lab.training.pretrain.pretrain.evaluate_mlm_sop`."""
    folder, data, length = asked.model, asked.data, asked.length
    source = find_source(folder)
    architectures = source.config.architectures if source.own else None
    if architectures != [EncoderForPreTraining.__name__]:
        raise ValueError(
            f"model {folder} has no head for the order of sentences: name a model of `nystrom pretrain`, such as "
            "RUN/best."
        )
    positions: int = source.config.max_position_embeddings
    length = positions if length is None else length
    check_at_least("length", length, 8)
    if length > positions:
        raise ValueError(f"length is {length} but model {folder} has {positions} positions: use fewer tokens.")
    verify(data, task=MlmSop.task)
    held_out = HeldOutInstances(MlmSop(data, "val", length=length), asked.instances)
    check_vocabulary(source, data, held_out.data.vocabulary)
    with no_file_bars():
        model = EncoderForPreTraining.from_pretrained(folder)
    device, precision = asked.device, asked.precision
    scores = score_model(model, held_out, batch_size=asked.batch_size, device=device, precision=precision)
    return score_rows(model.config, scores, Place(device=device, precision=precision, seed=None), length=length)


def score_rows(config: EncoderConfig, scores: Scores, place: Place, *, length: int) -> list[Row]:
    """Scores as rows; `repeats` is the number of masked words, or of instances."""
    rows = []
    for name, words in (("MLM", True), ("SOP", False)):
        samples = scores.words if words else scores.instances
        right = scores.mlm_accuracy if words else scores.sop_accuracy
        measured: list[tuple[str, float, tuple[float, float] | tuple[None, None]]] = [
            (f"validation {name} accuracy", right, wilson(right, samples)),
            (f"validation {name} loss", scores.mlm_loss if words else scores.sop_loss, (None, None)),
        ]
        if words:
            measured.append(("validation perplexity", scores.perplexity, (None, None)))
        rows += [
            result_row(
                config,
                quantity,
                value,
                "",
                place,
                spread=spread,
                repeats=samples,
                study=STUDY,
                facts={} if length == config.max_position_embeddings else {"length": length},
                note="the exponential of the loss is beyond float64" if value == scores.perplexity == math.inf else "",
            )
            for quantity, value, spread in measured
        ]
    return rows


def summary(scores: Scores) -> str:
    """Scores in one line."""
    return (
        f"held out: MLM accuracy {scores.mlm_accuracy:.1%}, loss {scores.mlm_loss:.3f}, perplexity "
        f"{scores.perplexity:.4g} ({scores.words} masked words); SOP accuracy {scores.sop_accuracy:.1%}, loss "
        f"{scores.sop_loss:.3f} ({scores.instances} instances)"
    )
