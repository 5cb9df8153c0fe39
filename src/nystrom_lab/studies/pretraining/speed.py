"""Tokens per second of a pretraining step, compared with transformers' own loop for masked words.

Three loops are compared, all with the same batch, length, encoder size and optimizer, on the same documents:

- "nystrom pretrain": this library's step on masked words and sentence order, which scores masked tokens only;
- "run_mlm, same encoder": the same encoder with a head for masked words that scores all tokens, in a plain
  `transformers.Trainer` with `DataCollatorForLanguageModeling` on blocks of tokens, as transformers' example run_mlm.py
  makes them;
- "run_mlm, BERT": the same loop with transformers' `BertForMaskedLM` of the same size, as shipped.

Each loop takes some steps in each round, in an order that changes from round to round, so that a slowdown of the
machine affects all. A step is everything between the ends of two steps: loading, forward, backward, clipping, the
optimizer, the schedule. Evaluations and checkpoints are left out. Padding is not counted among the tokens. On a CPU,
rows also hold the tokens per second of processor time, which other programs disturb less; with one thread the two are
comparable.
"""

from pathlib import Path

from nystrom.checks import check_at_least
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.hardware import Device, Precision, usable_device, usable_precision


def run_pretraining_speed(
    *,
    data: Path,
    to: Path,
    preset: str = "demo",
    attention: str = "nystrom",
    length: int = 512,
    batch_size: int = 8,
    num_hidden_layers: int | None = None,
    hidden_size: int | None = None,
    num_attention_heads: int | None = None,
    intermediate_size: int | None = None,
    steps: int = 3,
    rounds: int = 5,
    seed: int = 0,
    precision: Precision = "auto",
    device: Device = "auto",
    threads: int | None = None,
) -> list[Row]:
    """Measure tokens per second of pretraining, compared with transformers' own loop for masked words.

    Args:
        data: Folder made by `nystrom data prepare mlm-sop`.
        to: Folder of the rows, pretraining.csv.
        preset: The preset that gives the settings, as for `nystrom pretrain`.
        attention: Method.
        length: Tokens of an instance.
        batch_size: Instances per step.
        num_hidden_layers: Layers. Default, as for the next three: the preset's.
        hidden_size: Width of a token.
        num_attention_heads: Heads.
        intermediate_size: Width inside the feed-forward block.
        steps: Steps to measure per loop and round.
        rounds: Rounds.
        seed: Seed of initial weights and batches.
        precision: "auto" is bfloat16 autocast on an accelerator that has it, and float32 elsewhere.
        device: "auto" uses an accelerator if there is one.
        threads: CPU threads. Default: torch's choice.

    Returns:
        Rows of the tokens per second of each loop, and of the ratios of the first to the others: medians over the
        rounds, with the quartiles. On a CPU, also the same per second of processor time.

    Raises:
        ValueError: An invalid name, number, folder, device or precision.
    """
    check_at_least("steps", steps, 1)
    check_at_least("rounds", rounds, 1)
    if threads is not None:
        check_at_least("threads", threads, 1)
    device = usable_device(device)
    precision = usable_precision(precision, device)

    from nystrom_lab.studies.pretraining.loops import measure_loops
    from nystrom_lab.training.options import PretrainOptions
    from nystrom_lab.training.presets.pretraining import find_pretraining
    from nystrom_lab.training.pretrain.pretrain_settings import settle

    base = find_pretraining(preset)
    settings = settle(
        base,
        None,
        PretrainOptions(
            data=data,
            seed=seed,
            device=device,
            precision=precision,
            attention=attention,
            length=length,
            num_hidden_layers=num_hidden_layers,
            hidden_size=hidden_size,
            num_attention_heads=num_attention_heads,
            intermediate_size=intermediate_size,
            # The first step is not measured.
            steps=steps + 1,
            batch_size=batch_size,
            warmup_steps=0,
            evaluate_every=steps + 1,
            log_every=steps + 1,
            instances=1,
        ),
    )
    return measure_loops(Path(data), Path(to), base, settings, rounds=rounds, threads=threads)
