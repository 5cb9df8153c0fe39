"""Options of all speed measurements: documented options with their checks, the device, and the command in rows.

Needs no torch, so that the command line knows its options before it loads torch.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from nystrom.checks import check_at_least, check_choice, check_names, check_seed
from nystrom.command_options import parameters_of
from nystrom_lab.config import option_words
from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.measure.rows import cpu_name

if TYPE_CHECKING:
    import torch

Pass = Literal["forward", "forward+backward"]
Skip = Literal["without", "with", "both"]
Layout = Literal["tokens", "heads"]
Launch = Literal["eager", "compiled", "graph"]
Dtype = Literal["float32", "float64", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class TimingOptions:
    """Options of everything that is timed.

    Attributes:
        device: cpu, cuda or cuda:1.
        repeats: Timed calls of each method.
        seed: Seed of weights and inputs.
        threads: CPU threads; None keeps torch's setting.
        limit_seconds: Skip calls that would take longer.
    """

    device: str = "cpu"
    repeats: int = 7
    seed: int = 0
    threads: int | None = None
    limit_seconds: float = 60.0

    def __post_init__(self):
        check_at_least("repeats", self.repeats, 1)
        check_seed("seed", self.seed)
        if self.threads is not None:
            check_at_least("threads", self.threads, 1)
        if not self.limit_seconds > 0:
            raise ValueError(f"limit_seconds is {self.limit_seconds}; expected a positive number.")

    @property
    def threads_used(self) -> int:
        """CPU threads, as a number."""
        import torch

        return torch.get_num_threads() if self.threads is None else self.threads


@dataclass(frozen=True, kw_only=True)
class LengthOptions(TimingOptions):
    """Options of measurements over the number of tokens.

    Attributes:
        lengths: Numbers of tokens n, in any order.
        passes: Passes to measure.
        skip: Whether methods that have a skip convolution are measured without it, with it, or both.
        batch: Sequences b.
        kernel_size: Odd size of the skip convolution.
        dtype: Dtype of inputs, weights and activations.
        launches: How operations are launched: "eager", one by one; "compiled", by torch.compile; "graph", by a CUDA
            graph that replays the call, on a GPU only. Names of methods end in ", compiled" or ", graph".
    """

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    passes: tuple[Pass, ...] = ("forward", "forward+backward")
    skip: Skip = "both"
    batch: int = 1
    kernel_size: int = 33
    dtype: Dtype = "float32"
    launches: tuple[Launch, ...] = ("eager",)

    def __post_init__(self):
        super().__post_init__()
        for name, plural in (("lengths", "numbers of tokens"), ("passes", "passes"), ("launches", "launches")):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; expected at least one of {plural}.")
        for n in self.lengths:
            check_at_least("an entry of lengths", n, 1)
        for timed in self.passes:
            check_choice("an entry of passes", timed, get_args(Pass))
        for launch in self.launches:
            check_choice("an entry of launches", launch, get_args(Launch))
        check_choice("skip", self.skip, get_args(Skip))
        check_choice("dtype", self.dtype, get_args(Dtype))
        for name in ("batch", "kernel_size"):
            check_at_least(name, getattr(self, name), 1)
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size is {self.kernel_size}; expected an odd number, so that it has a middle.")


StepDtype = Literal["float32", "bfloat16"]
# The methods of Table 2 of Skyformer, with their numbers, fused exact attention, and near_far.
TABLE_2_METHODS = (
    "softmax-materialised", "softmax", "kernelized", "nystrom-128", "linformer-128", "informer-128", "performer-128",
    "reformer-2", "bigbird-3", "skyformer-128", "near_far",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(TimingOptions):
    """Measure time and peak memory of a training step with each method, on the tasks of the Long Range Arena.

    Rows go to training.csv in the folder, a task at a time. The same command continues an interrupted run and skips
    the tasks that are done.

    Attributes:
        tasks: listops, text, retrieval, image, pathfinder.
        methods: Methods of this library with their number, such as nystrom-128; ratios are taken against the first.
        batch: Samples of a step; None takes the paper's: 32, 16, 16, 256 and 128.
        precision: float32, or bfloat16 for autocast with float32 weights.
        to: Folder of the results.
    """

    tasks: tuple[str, ...] = tuple(LRA)
    methods: tuple[str, ...] = TABLE_2_METHODS
    batch: int | None = None
    precision: StepDtype = "float32"
    repeats: int = 3
    to: Path = Path("runs/training")

    def __post_init__(self):
        super().__post_init__()
        for name in ("tasks", "methods"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; expected at least one.")
        check_names("task", self.tasks, LRA)
        check_choice("precision", self.precision, get_args(StepDtype))
        if self.batch is not None:
            check_at_least("batch", self.batch, 1)


def find_device(name: str) -> "torch.device":
    """The device with this name, with its index.

    Raises:
        ValueError: A device that torch does not know or does not find, or whose memory cannot be measured.
    """
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device is {name!r}; expected 'cpu', 'cuda' or 'cuda:1'.") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}, whose memory cannot be measured; expected 'cpu' or 'cuda'.")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f"device is {name!r}, but torch finds {count} CUDA devices here: pass 'cpu'.")
        # Synchronising and memory statistics need the index.
        return torch.device("cuda", device.index or 0)
    return device


def device_name(device: "torch.device") -> str:
    """The name of the device in rows."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def command_line(words: Sequence[str], options: Callable[..., Any], values: Mapping[str, Any], last: str) -> str:
    """The command with these options, without its folder.

    Args:
        words: First words of the command.
        options: The class of its options, or a function of them.
        values: Their values by name.
        last: The argument that always comes last, so that runs which differ in nothing else can be recognised.
    """
    defaults = {name: each.default for name, each in parameters_of(options).items()}
    changed = {name: values[name] for name in defaults if name not in (last, "to") and values[name] != defaults[name]}
    # None may be passed for an option whose default is not None.
    named = {name: value if isinstance(value, tuple) else str(value) for name, value in changed.items()}
    return shlex.join([*words, *option_words({**named, last: tuple(values[last])})])
