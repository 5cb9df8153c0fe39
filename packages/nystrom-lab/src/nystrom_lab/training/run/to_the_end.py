"""The steps of a run, from its last good checkpoint if there is one, and the messages if they stop early."""

import pickle
from pathlib import Path

import torch
from transformers.trainer_pt_utils import safe_globals

from nystrom.whole_files import NotWritten
from nystrom_lab.training.finite import NotFinite
from nystrom_lab.training.hardware import is_main
from nystrom_lab.training.ranks.lost import LostRanks, naming_lost_ranks
from nystrom_lab.training.run.run_trainer import RunTrainer


def train_to_the_end(trainer: RunTrainer, *, resume: bool) -> None:
    """Train to the last step, from the last complete checkpoint if there is one.

    Args:
        trainer: The trainer, whose folder this process has locked.
        resume: Continue from the last complete checkpoint.

    Raises:
        ValueError: There are checkpoints, but none to continue from, or a file of one would run code.
        FloatingPointError: The loss or a weight is no longer finite.
        OSError: A file could not be written, or other processes were lost; the message names the folder, or them, and
            how to continue.
    """
    run, settings = trainer.run, trainer.settings
    step, damage = (run.last_step(), run.damage()) if resume else (None, [])
    if damage and step is None:
        faults = "; ".join(f"{checkpoint.name}: {what}" for checkpoint, what in damage)
        raise ValueError(
            f"{run.path} has no checkpoint to continue from ({faults}): put one back from a copy, or move them to "
            "another folder to start at step 1."
        )
    trainer.accelerator.wait_for_everyone()
    if is_main():
        for checkpoint, what in damage:
            print(f"warning: {checkpoint} is skipped: {what}.", flush=True)
        run.clear_unfinished()
        if resume:
            print(
                f"Continuing after step {step}."
                if step
                else "There is no complete checkpoint yet: starting at step 1.",
                flush=True,
            )
    trainer.accelerator.wait_for_everyone()
    try:
        with naming_lost_ranks(lambda: f"in step {trainer.state.global_step + 1}", trainer.remedy):
            trainer.train(resume_from_checkpoint=None if step is None else str(run.checkpoint(step)))
    except NotFinite as error:
        good = run.last_step()
        where = (
            "there is no checkpoint before it"
            if good is None
            else f"the last good checkpoint is {run.checkpoint(good)}"
        )
        raise NotFinite(
            f"{error}; {where}. Start another run with a lower --learning-rate"
            f"{'' if settings.precision == 'float32' else ' or with --precision float32'}."
        ) from error
    except pickle.UnpicklingError as error:
        assert step is not None, "only a checkpoint is unpickled"
        checkpoint = run.checkpoint(step)
        raise ValueError(
            f"{_refused(checkpoint)} holds pickled code, which is never run ({str(error).partition('. ')[0]}): delete "
            f"{checkpoint} and start the same command again, which continues from the checkpoint before it."
        ) from error
    except (NotWritten, LostRanks):
        raise
    except OSError as error:
        raise OSError(
            f"{run.path} stopped in step {trainer.state.global_step + 1} ({error}): {trainer.remedy()}."
        ) from error
    except KeyboardInterrupt:
        if is_main():
            print(
                f"\nStopped in step {trainer.state.global_step + 1} of {settings.steps}; continue with --resume, "
                f"from step {run.last_step() or 0}."
            )
        raise


def _refused(checkpoint: Path) -> Path:
    """The file of a checkpoint that is rejected because it would run code; the folder if it is not a single file."""
    for file in sorted(checkpoint.glob("*.pt*")):
        try:
            with safe_globals():
                torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            return file
    return checkpoint
