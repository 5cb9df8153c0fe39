"""Studies as cluster jobs, one job a study, so that all parts of a study are timed on the same machine."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nystrom_lab.config import Slurm
from nystrom_lab.training.grid.processes import Failure
from nystrom_lab.training.grid.slurm import Jobs, Work
from nystrom_papers.studies.reproduce.run import Job, check_study, is_measured, run_study
from nystrom_papers.studies.reproduce.study import Setting


def measure_in_jobs(studies: Sequence[Job], to: Path, slurm: Slurm, *, threads: int) -> list[Failure]:
    """Measure the missing parts of studies as jobs, and wait until they end.

    Returns:
        The studies that were not measured.

    Raises:
        ValueError: SLURM is missing or rejects such a job.
    """
    to = to.resolve()
    works = [
        Work(
            study.folder.name,
            measure_study,
            [study.name, asdict(study.setting), str(to), threads],
            lambda study=study: "measured" if is_measured(study) else "",
        )
        for study in studies
    ]
    return Jobs(to, slurm, cpus=threads, at_once=None).run(works)


def measure_study(name: str, setting: Mapping[str, Any], to: str, threads: int) -> None:
    """Run a study, as a job does.

    `setting` has the fields of `nystrom_papers.studies.reproduce.study.Setting`.
    """
    import torch

    torch.set_num_threads(threads)
    run_study(check_study(name, Setting(**setting), Path(to)))
