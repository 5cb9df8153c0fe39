"""The loops that `nystrom_lab.studies.pretraining.speed` compares, and their timing."""

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import IntervalStrategy

from nystrom.models.configuration import EncoderConfig
from nystrom.models.files.tokenizer import load_tokenizer
from nystrom.models.heads.language import EncoderForMaskedLM, EncoderForPreTraining
from nystrom.progress import Progress
from nystrom.turns import quartiles
from nystrom_lab.data.language.mlm_sop.dataset import TASK, MlmSop
from nystrom_lab.data.language.mlm_sop.vocabulary import Vocabulary
from nystrom_lab.data.store.token_files import open_split
from nystrom_lab.measure.rows import Row, append_rows, check_rows
from nystrom_lab.training.presets.pretraining import PretrainingPreset
from nystrom_lab.training.pretrain.data import HeldOutInstances, open_instances
from nystrom_lab.training.pretrain.pretrain_settings import PretrainingSettings
from nystrom_lab.training.pretrain.source import encoder_config
from nystrom_lab.training.pretrain.trainer import PretrainingTrainer
from nystrom_lab.training.results import Place, result_row
from nystrom_lab.training.run.arguments import training_arguments
from nystrom_lab.training.run.folder import RunFolder
from nystrom_lab.training.run.progress import RunProgress

OURS, SAME, BERT = "nystrom pretrain", "run_mlm, same encoder", "run_mlm, BERT"

Loop = Callable[[Path], Trainer]


def measure_loops(
    data: Path,
    to: Path,
    base: PretrainingPreset,
    settings: PretrainingSettings,
    *,
    rounds: int,
    threads: int | None,
) -> list[Row]:
    """Measure the loops, for `nystrom_lab.studies.pretraining.speed.run_pretraining_speed`.

    Args:
        data: Folder made by `nystrom data prepare mlm-sop`.
        to: Folder of the rows.
        base: The preset.
        settings: Settings of the first loop; all steps but the first are measured.
        rounds: Rounds.
        threads: CPU threads. Default: torch's choice.
    """
    check_rows(to / "pretraining.csv")
    train, held_out = open_instances(
        data, length=settings.length, seed=settings.seed, instances=1, batch_size=settings.batch_size
    )
    config = encoder_config(
        settings, {"hidden_act": base.hidden_act, "initializer_range": base.initializer_range}, train.vocabulary
    )
    if threads is not None:
        torch.set_num_threads(threads)
    loops = _loops(data, settings, base, config, train, held_out)
    speeds: dict[str, list[_Speed]] = {name: [] for name in loops}
    names = list(loops)
    with Progress("turns", rounds * len(loops)) as bar:
        for number in range(rounds):
            start = number % len(names)
            for name in names[start:] + names[:start]:
                with tempfile.TemporaryDirectory() as place:
                    speeds[name].append(_speed(loops[name](Path(place)), settings.steps - 1))
                bar.update()
    rows = _rows(config, settings, speeds)
    append_rows(to / "pretraining.csv", rows)
    return rows


def _loops(
    data: Path,
    settings: PretrainingSettings,
    base: PretrainingPreset,
    config: EncoderConfig,
    train: MlmSop,
    held_out: HeldOutInstances,
) -> dict[str, Loop]:
    """For each loop a function from a folder to its trainer; the models are created once."""
    set_seed(settings.seed)
    ours = EncoderForPreTraining(config)
    same = EncoderForMaskedLM(EncoderConfig.from_dict(config.to_dict() | {"sparse_prediction": False}))
    bert = BertForMaskedLM(
        BertConfig(
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            hidden_dropout_prob=config.hidden_dropout_prob,
            num_hidden_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            intermediate_size=config.intermediate_size,
        )
    )
    blocks = _blocks(data, train.vocabulary, settings)
    collate = DataCollatorForLanguageModeling(load_tokenizer(data), mlm_probability=0.15)

    def pretraining(place: Path) -> Trainer:
        run = RunFolder(place)
        arguments = training_arguments(settings, base, run, reports=[], clip_norm=base.clip_norm)
        arguments.eval_strategy = arguments.save_strategy = IntervalStrategy.NO
        trainer = PretrainingTrainer(ours, arguments, settings=settings, train=train, held_out=held_out, run=run)
        trainer.remove_callback(RunProgress)
        return trainer

    def run_mlm(model: nn.Module) -> Loop:
        def make(place: Path) -> Trainer:
            arguments = TrainingArguments(
                output_dir=str(place),
                max_steps=settings.steps,
                per_device_train_batch_size=settings.batch_size,
                learning_rate=settings.learning_rate,
                weight_decay=base.weight_decay,
                save_strategy="no",
                logging_strategy="no",
                seed=settings.seed,
                use_cpu=settings.device == "cpu",
                bf16=settings.precision == "bfloat16",
                fp16=settings.precision == "float16",
                disable_tqdm=True,
                report_to=[],
            )
            trainer = Trainer(
                model=model,
                args=arguments,
                data_collator=collate,
                train_dataset=blocks,  # pyright: ignore[reportArgumentType] (a list is a dataset)
            )
            trainer.remove_callback(PrinterCallback)
            return trainer

        return make

    return {OURS: pretraining, SAME: run_mlm(same), BERT: run_mlm(bert)}


def _blocks(data: Path, vocabulary: Vocabulary, settings: PretrainingSettings) -> list[dict[str, list[int]]]:
    """As many blocks of tokens from the training documents as the steps take, made as in run_mlm.py."""
    tokens, room = open_split(data, "train", task=TASK).tokens, settings.length - 2
    wanted = settings.batch_size * settings.steps
    if tokens.size < room * wanted:
        raise ValueError(
            f"data {data} hold {tokens.size} training tokens but {settings.steps} steps of {settings.batch_size} "
            f"blocks take {room * wanted}: use fewer steps, a smaller batch or more texts."
        )
    special = [1] + [0] * room + [1]
    return [
        {
            "input_ids": [vocabulary.cls_token_id, *block.tolist(), vocabulary.sep_token_id],
            "attention_mask": [1] * settings.length,
            "special_tokens_mask": special,
        }
        for block in np.asarray(tokens[: room * wanted], dtype=np.int64).reshape(wanted, room)
    ]


class _Speed(NamedTuple):
    """Tokens per second, and per second of all cores of the processor."""

    wall: float
    processor: float


def _speed(trainer: Trainer, steps: int) -> _Speed:
    """The speed of the steps after the first."""
    counted: list[int] = []

    def count(model: nn.Module, given: Any, inputs: dict[str, Any]) -> None:
        counted.append(int(inputs["attention_mask"].sum()))

    clock = _Clock()
    trainer.add_callback(clock)
    assert isinstance(trainer.model, nn.Module)
    hook = trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        trainer.train()
    finally:
        hook.remove()
    assert len(counted) == len(clock.ends) == steps + 1
    (started, cpu_started), (ended, cpu_ended) = clock.ends[0], clock.ends[-1]
    tokens = sum(counted[1:])
    return _Speed(tokens / (ended - started), tokens / (cpu_ended - cpu_started))


class _Clock(TrainerCallback):
    """When each step ended, in wall-clock and processor time."""

    def __init__(self):
        self.ends: list[tuple[float, float]] = []

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.ends.append((time.perf_counter(), time.process_time()))


def _rows(config: EncoderConfig, settings: PretrainingSettings, speeds: Mapping[str, list[_Speed]]) -> list[Row]:
    place = Place(device=settings.device, precision=settings.precision, seed=settings.seed)
    measured: dict[str, tuple[list[float], str]] = {}
    for place_of_clock, second in enumerate(("second", "CPU second")):
        if settings.device != "cpu" and second == "CPU second":
            continue
        found = {name: [speed[place_of_clock] for speed in of_rounds] for name, of_rounds in speeds.items()}
        measured |= {f"tokens per {second} of {name}": (values, "1/s") for name, values in found.items()}
        for name in (SAME, BERT):
            ratios = [ours / theirs for ours, theirs in zip(found[OURS], found[name], strict=True)]
            measured[f"tokens per {second} of {OURS} / {name}"] = (ratios, "")
    facts = {
        "ffn": config.intermediate_size, "vocabulary": config.vocab_size, "b": settings.batch_size,
        "steps": settings.steps - 1, "threads": torch.get_num_threads(),
    }  # fmt: skip
    rows = []
    for quantity, (values, unit) in measured.items():
        found = quartiles(values)
        rows.append(
            result_row(
                config,
                quantity,
                found.middle,
                unit,
                place,
                spread=found.spread,
                repeats=len(values),
                study="pretraining speed",
                facts=facts,
            )
        )
    return rows
