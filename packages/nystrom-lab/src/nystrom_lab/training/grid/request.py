"""The resources that the runs of a grid request from a cluster."""

from dataclasses import asdict, dataclass
from typing import Literal

from nystrom.checks import check_at_least, check_choice

Where = Literal["local", "slurm"]


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """The resources that each job requests from SLURM.

    Attributes:
        partition: Partition. Default: the cluster's choice.
        time: Time limit of a job in minutes; then it is requeued and continues from its last checkpoint.
        timeouts: How often a job may reach the time limit.
        gpus: GPUs of a job, 0 or 1.
        memory: Memory of a job in gigabytes. Default: the cluster's choice.
        account: Account.
        qos: Quality of service.
        constraint: Features that the node must have.
    """

    partition: str | None = None
    time: int = 60
    timeouts: int = 10
    gpus: int = 0
    memory: int | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None

    def check(self, on: str) -> None:
        """Check the values, and that none are given if SLURM is not used.

        Raises:
            ValueError: An invalid value.
        """
        check_choice("on", on, ("local", "slurm"))
        for name, value in asdict(self).items():
            if on == "local" and value != getattr(NO_SLURM, name):
                raise ValueError(f"slurm.{name} is {value!r} but on is 'local': add --on slurm, or leave it out.")
        check_at_least("slurm.time", self.time, 1)
        check_at_least("slurm.timeouts", self.timeouts, 0)
        if self.gpus not in (0, 1):
            raise ValueError(f"slurm.gpus is {self.gpus}; expected 0 or 1: a job trains on one device.")
        if self.memory is not None:
            check_at_least("slurm.memory", self.memory, 1)

    def device(self, device: str, precision: str) -> str:
        """The device of a run in a job, "cuda" or "cpu".

        Args:
            device: The requested device; "auto" is what the job has.
            precision: The requested precision; the capabilities of a remote GPU cannot be checked here.

        Raises:
            ValueError: The job has no such device, or a GPU and no precision.
        """
        has = "cuda" if self.gpus else "cpu"
        check_choice("device", device, ("auto", "cpu", "cuda"))
        if device not in ("auto", has):
            raise ValueError(f"device is {device!r} but slurm.gpus is {self.gpus}: a job then has {has!r}. Change one.")
        if has == "cuda" and precision == "auto":
            raise ValueError(
                "precision is 'auto', but the GPUs of the jobs cannot be checked here: choose bfloat16 or float32."
            )
        return has

    def flags(self, cpus: int) -> dict[str, object]:
        """The options of sbatch."""
        flags: dict[str, object] = {"time": self.time, "cpus-per-task": cpus, "requeue": True}
        flags |= {name: getattr(self, name) for name in ("partition", "account", "qos", "constraint")}
        flags |= {"gpus-per-node": self.gpus or None, "mem": None if self.memory is None else f"{self.memory}G"}
        return {name: value for name, value in flags.items() if value is not None}


NO_SLURM = Slurm()
