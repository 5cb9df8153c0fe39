"""One pretraining, from its options to its results."""

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import set_seed

from nystrom.attention.backend import check_backend_device
from nystrom.models.heads.language import EncoderForPreTraining
from nystrom.models.memory import check_memory
from nystrom_lab.data.language.mlm_sop.dataset import MlmSop
from nystrom_lab.data.store.header import read_header
from nystrom_lab.training.additions.compiling import check_compiler
from nystrom_lab.training.command import command_line
from nystrom_lab.training.hardware import is_main
from nystrom_lab.training.options import PretrainOptions
from nystrom_lab.training.presets.pretraining import PretrainingPreset
from nystrom_lab.training.pretrain.data import HeldOutInstances, open_instances
from nystrom_lab.training.pretrain.pretrain_outputs import finish
from nystrom_lab.training.pretrain.pretrain_settings import PretrainingSettings, settle
from nystrom_lab.training.pretrain.source import check_vocabulary, describe, encoder_config, find_source, start_model
from nystrom_lab.training.pretrain.trainer import PretrainingTrainer
from nystrom_lab.training.ranks.lost import leaving_the_group
from nystrom_lab.training.ranks.pieces import check_pieces
from nystrom_lab.training.run.arguments import training_arguments
from nystrom_lab.training.run.finished import is_done
from nystrom_lab.training.run.folder import RunFolder
from nystrom_lab.training.run.progress import no_file_bars
from nystrom_lab.training.run.to_the_end import train_to_the_end
from nystrom_lab.training.versions import versions


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
        if is_done(run, resume=asked.resume):
            return
        reports = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
        arguments = training_arguments(
            settings, base, run, reports=reports, clip_norm=base.clip_norm, workers=asked.workers, timeout=asked.timeout
        )
        set_seed(settings.seed)
        with no_file_bars():
            if source is None:
                network, new = EncoderForPreTraining(config), []
            else:
                network, new = start_model(settings, source)
            if is_main():
                run.start(
                    settings, data={"folder": str(data.resolve()), "fingerprint": fingerprint}, versions=versions()
                )
                if source is not None:
                    print(f"{describe(source, settings, new)}.", flush=True)
                print(_summary(network, settings, train, held_out), flush=True)
            # What the model was made of must not decide what is drawn in training.
            set_seed(settings.seed)
            trainer = PretrainingTrainer(network, arguments, settings=settings, train=train, held_out=held_out, run=run)
            train_to_the_end(trainer, resume=asked.resume)
            if is_main():
                finish(trainer, settings, run, data, command=command_line(words, settings.processes))


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
