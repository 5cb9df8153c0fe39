"""The data sets that the presets train on."""

from dataclasses import dataclass

from nystrom_lab.data.lra.facts import LRA


@dataclass(frozen=True, kw_only=True)
class DataSizes:
    """The data set of a preset; for a generated task, it is generated if missing.

    Attributes:
        folder: Name of its folder under data/.
        train: Samples for training.
        val: Samples for choosing the best checkpoint.
        test: Samples for the test.
        min_length: Drawn samples have more tokens than this.
        max_length: No sample, or document of one, has more tokens than this: the positions of the model.
        contour: Dashes of a long snake of Pathfinder; None for those of the published hard images.
    """

    folder: str
    train: int
    val: int
    test: int
    min_length: int = 0
    max_length: int
    contour: int | None = None


def published_sizes(task: str, *, max_length: int | None = None) -> DataSizes:
    """The published data set of a task, its texts cut at `max_length` if given.

    Args:
        task: A name in `nystrom_lab.data.lra.facts.LRA`.
        max_length: Bytes to keep of each text. Default: the papers'.
    """
    facts = LRA[task]
    return DataSizes(
        folder=task if max_length is None else f"{task}-{max_length}",
        train=facts.train,
        val=facts.val,
        test=facts.test,
        min_length=facts.min_length,
        max_length=facts.max_length if max_length is None else max_length,
    )
