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

import torch
from transformers import set_seed

from nystrom.attention.backend import check_backend_device
from nystrom.checks import check_at_least
from nystrom.models.heads.language import EncoderForPreTraining
from nystrom_lab.config import EvaluatePretrainedOptions, PretrainOptions, asked_words, command_line
from nystrom_lab.data.language.mlm_sop.dataset import MlmSop
from nystrom_lab.data.store.prepared_folder import verify
from nystrom_lab.data.store.token_files import read_header
from nystrom_lab.measure.memory import check_memory
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.compiling import check_compiler
from nystrom_lab.training.hardware import is_main, usable_device, usable_precision
from nystrom_lab.training.pretrain.data import HeldOutInstances, open_instances
from nystrom_lab.training.pretrain.masked_language import PretrainingTrainer
from nystrom_lab.training.pretrain.pretrain_settings import (
    PretrainingPreset,
    PretrainingSettings,
    find_pretraining,
    settle,
)
from nystrom_lab.training.pretrain.scores import score_model, score_rows
from nystrom_lab.training.pretrain.source import check_vocabulary, describe, encoder_config, find_source, start_model
from nystrom_lab.training.ranks import check_pieces, leaving_the_group
from nystrom_lab.training.results import Provenance
from nystrom_lab.training.run_folder import RunFolder
from nystrom_lab.training.run_progress import no_file_bars
from nystrom_lab.training.run_trainer import run_to_the_end, training_arguments


def pretrain(asked: PretrainOptions) -> Path:
    """Pretrain an encoder on masked words and sentence order; keeps the checkpoint that is best on held-out documents.

    Arguments that are not given take the preset's values. Under torchrun the processes share each batch. A run can be
    interrupted at any time and continued with `resume`.

    Returns:
        The folder of the run; the best model is in its folder best, with the tokenizer of the data.

    Raises:
        ValueError: A name, number, folder, model, device or precision cannot be used; raised before training.
        FloatingPointError: The loss or a weight is no longer finite.
    """
    base = find_pretraining(asked.preset)
    check_at_least("workers", asked.workers, 0)
    shown = asked.attention or ("as-it-is" if asked.model else "nystrom")
    folder = asked.to or Path("runs") / f"pretrain-{asked.preset}-{shown}-seed{asked.seed}"
    run, device = RunFolder(Path(folder)), usable_device(asked.device)
    asked = replace(asked, to=run.path, device=device, precision=usable_precision(asked.precision, device))

    words = ["pretrain", *asked_words(asked)]
    pretrain_model(base, run, replace(asked, resume=run.is_resumed(asked.resume)), words=words)
    return run.path


@leaving_the_group
def pretrain_model(base: PretrainingPreset, run: RunFolder, asked: PretrainOptions, *, words: Sequence[str]) -> None:
    """Pretrain; see `pretrain`.

    Args:
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


def evaluate_mlm_sop(asked: EvaluatePretrainedOptions) -> list[Row]:
    """Evaluate a pretrained model on held-out documents.

    Returns:
        Rows of `nystrom_lab.measure.rows`: accuracy, loss and perplexity of the masked words, and accuracy and loss of
        the sentence order. Accuracies are between 0 and 1, with their 95 % intervals.

    Raises:
        ValueError: An invalid folder, number, device or precision, a model that was not pretrained on this task, or
            data with another vocabulary.
    """
    check_at_least("batch_size", asked.batch_size, 1)
    check_at_least("instances", asked.instances, 1)
    device = usable_device(asked.device)
    precision = usable_precision(asked.precision, device)
    folder, data, length = Path(asked.model), Path(asked.data), asked.length
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
    held_out = HeldOutInstances(MlmSop(data, "val", length=length), asked.instances)
    check_vocabulary(source, data, held_out.data.vocabulary)
    with no_file_bars():
        model = EncoderForPreTraining.from_pretrained(folder)
    scores = score_model(model, held_out, batch_size=asked.batch_size, device=device, precision=precision)
    provenance = Provenance(device, precision, seed=None, facts={"fingerprint": source.fingerprint})
    return score_rows(model.config, scores, provenance, length=length)
