"""Train a model on a task, from the options to the results.

Everything that determines the result is resolved and checked before data or model are created. On the same machine and
with the same number of processes, a run that was killed and resumed ends with the weights and the curves of one that
was not; up to rounding with more than two processes, which add gradients in an order that is not fixed.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nystrom.models import EncoderConfig, EncoderModel
from nystrom_lab.config import TrainOptions
from nystrom_lab.training.arena import EncoderTrainer
from nystrom_lab.training.life import Data, Kind, execute, leaving_the_group
from nystrom_lab.training.presets import Preset, find_preset
from nystrom_lab.training.run_folder import RunFolder
from nystrom_lab.training.run_settings import Settings, data_positions, lengthened
from nystrom_lab.training.run_trainer import RunTrainer, training_arguments
from nystrom_lab.training.tasks import (
    Model,
    check_data,
    default_folder,
    find_task,
    fingerprint,
    open_splits,
    prepare_if_missing,
    prepared_folder,
)


@leaving_the_group
def train(options: TrainOptions) -> Path:
    """Train a model on a task, choose its best checkpoint on the validation split, and evaluate it on the test split.

    With `mask_share` the model learns to predict masked tokens of the task's own inputs instead of their class, and the
    test split is not read: `nystrom pretrain TASK`. Another run can start from this encoder with `model`.

    `nystrom_lab.training.run_settings.train_options` makes the options from a preset. Under torchrun the processes
    share each batch. A run can be interrupted at any time and continued with `resume`.

    Returns:
        The folder of the run; the best model is in its folder best.

    Raises:
        ValueError: An invalid name, number, folder, device or precision; raised before data or model are created.
        FloatingPointError: The loss or a weight is no longer finite.
    """
    task, max_length = options.task, options.max_length
    start = None
    if options.model is not None:
        from nystrom_lab.training.start import find_encoder

        start = find_encoder(Path(options.model))
    name = options.preset
    preset = find_preset(task, name) if max_length is None else lengthened(find_preset(task, name), max_length)
    parts = ["pretrain"] if options.mask_share else []
    parts += [
        task,
        options.attention,
        name,
        *(["pretrained"] if start else []),
        *([str(max_length)] if max_length else []),
    ]
    run = RunFolder(
        Path("runs") / "-".join([*parts, f"seed{options.seed}"]) if options.to is None else Path(options.to)
    )
    data = None if options.data is None else Path(options.data)
    if data is None:
        options.check_no_columns("no data are named with --data")
        data = run.data_folder()
    check_data(task, data)
    settings = Settings.resolve(
        replace(options, data=data, to=run.path, resume=run.is_resumed(options.resume)),
        num_positions=data_positions(preset, data) if max_length is None else max_length,
        start=start,
    )
    execute(TrainRun(settings, run, preset), resume=settings.resume)
    return run.path


class TrainRun(Kind[Settings, Settings]):
    """A training on a task.

    Args:
        options: The resolved settings.
        run: The folder of the run.
        preset: The preset whose data are used if the settings name none.
    """

    def __init__(self, options: Settings, run: RunFolder, preset: Preset):
        super().__init__(options, run)
        self.preset = preset

    def settings(self) -> Settings:
        """Check what the machine can do with the settings."""
        settings = self.options
        if settings.context_parallel > 1:
            from nystrom_lab.training.ranks import check_pieces

            config = settings.encoder_config()
            check_pieces(settings.context_parallel, lambda: _new_model(settings, config), compile=settings.compile)
        if settings.compile and settings.denoise:
            raise ValueError(
                "compile is on, but denoise collects the states of all layers, which a compiled graph does not: leave "
                "one out."
            )
        if settings.compile:
            from nystrom_lab.training.compiling import check_compiler

            check_compiler(settings.device)
        return settings

    def data(self, settings: Settings) -> Data:
        """Prepare the data if they are missing, and open them; processes of one machine wait for the first."""
        self.arguments = training_arguments(settings, settings, self.run, adam_epsilon=self.preset.adam_epsilon)
        with self.arguments.main_process_first(local=False):
            if settings.data is None:
                self.folder = default_folder(self.preset.data)
                prepare_if_missing(settings.task, self.folder, self.preset.data)
            else:
                self.folder = prepared_folder(
                    settings.task, settings.data, max_length=settings.longest, columns=settings
                )
        self.splits = open_splits(
            settings.task,
            self.folder,
            num_positions=settings.longest,
            batch_size=settings.batch_size,
            test=not settings.mask_share,
        )
        return Data(str(self.folder.resolve()), fingerprint(self.splits, self.folder))

    def model(self, settings: Settings) -> Model | EncoderModel:
        """Make the model, with the weights of an encoder if the settings name one."""
        return start_model(settings, settings.encoder_config(self.splits.train.classes))

    def trainer(self, model: Any, settings: Settings) -> RunTrainer[Settings]:
        """Make the trainer of classes or of masked tokens."""
        kind = EncoderTrainer
        if settings.mask_share:
            from nystrom_lab.training.masked import MaskedTrainer as kind
        return kind(model, self.arguments, settings=settings, splits=self.splits, run=self.run)

    def words(self, settings: Settings) -> Sequence[str]:
        """The settings as words."""
        return replace(settings, data=settings.data or self.folder, to=self.run.path).words()


def start_model(settings: Settings, config: EncoderConfig) -> Model | EncoderModel:
    """The model of a run: an encoder alone for masked tokens, or with a new head for classes.

    Args:
        settings: Settings of the run; if they name an encoder, its weights are used.

    Raises:
        ValueError: Weights that do not match; the message names them.
    """
    if settings.model is None:
        return _new_model(settings, config)
    from nystrom_lab.training.start import load_start

    encoder, _ = load_start(settings.model, EncoderModel, config=config)
    if settings.mask_share:
        return encoder
    model = find_task(settings.task).model(config)
    model.nystromformer.load_state_dict(encoder.state_dict())
    return model


def _new_model(settings: Settings, config: EncoderConfig) -> Model | EncoderModel:
    return EncoderModel(config) if settings.mask_share else find_task(settings.task).model(config)
