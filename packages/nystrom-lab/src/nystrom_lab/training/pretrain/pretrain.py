"""Pretrain an encoder on masked words and sentence order, and evaluate one.

On the same machine and with the same number of processes, a run that was killed and resumed ends with the weights and
the curves of one that was not. Errors in the options, the data and the starting model are found before training
starts.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nystrom.attention.backend import check_backend_device
from nystrom.checks import check_at_least
from nystrom.models.heads.language import EncoderForPreTraining
from nystrom_lab.config import EvaluatePretrainedOptions, PretrainOptions, words_of
from nystrom_lab.data.language.mlm_sop.dataset import MlmSop
from nystrom_lab.data.store.prepared_folder import verify
from nystrom_lab.data.store.token_files import read_header
from nystrom_lab.measure.memory import check_memory
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.compiling import check_compiler
from nystrom_lab.training.hardware import is_main, usable_device, usable_precision
from nystrom_lab.training.life import Data, Kind, execute, leaving_the_group
from nystrom_lab.training.pretrain.data import HeldOutInstances, open_instances
from nystrom_lab.training.pretrain.masked_language import PretrainingTrainer
from nystrom_lab.training.pretrain.pretrain_settings import (
    PretrainingSettings,
    find_pretraining,
)
from nystrom_lab.training.pretrain.scores import score_model, score_rows
from nystrom_lab.training.pretrain.source import check_vocabulary, describe, encoder_config, find_source, start_model
from nystrom_lab.training.ranks import check_pieces
from nystrom_lab.training.results import Provenance
from nystrom_lab.training.run_folder import RunFolder
from nystrom_lab.training.run_progress import no_file_bars
from nystrom_lab.training.run_trainer import RunTrainer, training_arguments


@leaving_the_group
def pretrain(options: PretrainOptions) -> Path:
    """Pretrain an encoder on masked words and sentence order; keeps the checkpoint that is best on held-out documents.

    Arguments that are not given take the preset's values. Under torchrun the processes share each batch. A run can be
    interrupted at any time and continued with `resume`.

    Returns:
        The folder of the run; the best model is in its folder best, with the tokenizer of the data.

    Raises:
        ValueError: A name, number, folder, model, device or precision cannot be used; raised before training.
        FloatingPointError: The loss or a weight is no longer finite.
    """
    find_pretraining(options.preset)
    check_at_least("workers", options.workers, 0)
    shown = options.attention or ("as-it-is" if options.model else "nystrom")
    folder = options.to or Path("runs") / f"pretrain-{options.preset}-{shown}-seed{options.seed}"
    run, device = RunFolder(Path(folder)), usable_device(options.device)
    options = replace(options, to=run.path, device=device, precision=usable_precision(options.precision, device))
    execute(PretrainRun(options, run), resume=run.is_resumed(options.resume))
    return run.path


class PretrainRun(Kind[PretrainOptions, PretrainingSettings]):
    """A pretraining on masked words and sentence order.

    Args:
        options: The options, with device and precision already resolved from "auto".
        run: The folder of the run.
    """

    def settings(self) -> PretrainingSettings:
        """Resolve the settings, and check that model, data and machine fit them."""
        options, self.base = self.options, find_pretraining(self.options.preset)
        data = Path(options.data)
        self.source = None if options.model is None else find_source(Path(options.model))
        settings = PretrainingSettings.resolve(options, self.base, self.source)
        self.train, self.held_out = open_instances(
            data,
            length=settings.length,
            seed=settings.seed,
            instances=settings.instances,
            batch_size=settings.batch_size,
        )
        vocabulary = self.train.vocabulary
        if self.source is not None:
            check_vocabulary(self.source, data, vocabulary)
        check_memory(
            layers=settings.num_hidden_layers,
            width=settings.hidden_size,
            intermediate=settings.intermediate_size,
            vocabulary=vocabulary.size,
            # Weights, gradients and the two means of AdamW.
            numbers=4,
        )
        # Unknown options, and sizes that do not fit each other, are found here.
        preset_fields = {"hidden_act": self.base.hidden_act, "initializer_range": self.base.initializer_range}
        self.config = config = encoder_config(settings, preset_fields, vocabulary)
        check_pieces(options.context_parallel, lambda: EncoderForPreTraining(config), compile=settings.compile)
        check_backend_device(settings.options.get("backend", "auto"), torch.device(settings.device))
        if settings.compile:
            check_compiler(settings.device)
        return settings

    def data(self, settings: PretrainingSettings) -> Data:
        """The data are open; their header lists their files."""
        data = Path(self.options.data)
        files = json.dumps(read_header(data)["files"], sort_keys=True)
        return Data(str(data.resolve()), hashlib.sha256(files.encode()).hexdigest()[:16])

    def model(self, settings: PretrainingSettings) -> EncoderForPreTraining:
        """Make the model; what it was made of does not decide what is drawn in training."""
        if self.source is None:
            return EncoderForPreTraining(self.config)
        model, self.new = start_model(settings, self.source)
        return model

    def trainer(self, model: Any, settings: PretrainingSettings) -> RunTrainer[PretrainingSettings]:
        """Say what is trained on what, and make the trainer."""
        if is_main():
            if self.source is not None:
                print(f"{describe(self.source, settings, self.new)}.", flush=True)
            print(_summary(model, settings, self.train, self.held_out), flush=True)
        base, workers = self.base, self.options.workers
        arguments = training_arguments(settings, base, self.run, adam_epsilon=base.adam_epsilon, workers=workers)
        return PretrainingTrainer(
            model, arguments, settings=settings, train=self.train, held_out=self.held_out, run=self.run
        )

    def words(self, settings: PretrainingSettings) -> Sequence[str]:
        """The options as words."""
        return ["pretrain", *words_of(self.options)]


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


def evaluate_mlm_sop(options: EvaluatePretrainedOptions) -> list[Row]:
    """Evaluate a pretrained model on held-out documents.

    Returns:
        Rows of `nystrom_lab.measure.rows`: accuracy, loss and perplexity of the masked words, and accuracy and loss of
        the sentence order. Accuracies are between 0 and 1, with their 95 % intervals.

    Raises:
        ValueError: An invalid folder, number, device or precision, a model that was not pretrained on this task, or
            data with another vocabulary.
    """
    check_at_least("batch_size", options.batch_size, 1)
    check_at_least("instances", options.instances, 1)
    device = usable_device(options.device)
    precision = usable_precision(options.precision, device)
    folder, data, length = Path(options.model), Path(options.data), options.length
    source = find_source(folder)
    architectures = source.config.architectures if source.own else None
    if architectures != [EncoderForPreTraining.__name__]:
        raise ValueError(
            f"model {folder} has no head for the order of sentences: name a model of `nystrom pretrain`, such as "
            "RUN/best."
        )
    num_positions: int = source.config.max_position_embeddings
    length = num_positions if length is None else length
    check_at_least("length", length, 8)
    if length > num_positions:
        raise ValueError(f"length is {length} but model {folder} has {num_positions} positions: use fewer tokens.")
    verify(data, task=MlmSop.task)
    held_out = HeldOutInstances(MlmSop(data, "val", length=length), options.instances)
    check_vocabulary(source, data, held_out.data.vocabulary)
    with no_file_bars():
        model = EncoderForPreTraining.from_pretrained(folder)
    scores = score_model(model, held_out, batch_size=options.batch_size, device=device, precision=precision)
    provenance = Provenance(device, precision, seed=None, facts={"fingerprint": source.fingerprint})
    return score_rows(model.config, scores, provenance, length=length)
