"""The facts of a task are those of its data and of the tables that name it."""

from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.data.lra.image import Image
from nystrom_lab.data.lra.listops.task import PUBLISHED_SETTINGS, ListOps
from nystrom_lab.data.lra.pathfinder.task import PUBLISHED_SIZES, Pathfinder
from nystrom_lab.data.lra.texts.retrieval import Retrieval
from nystrom_lab.data.lra.texts.reviews import Text
from nystrom_lab.training.tasks import TASKS
from nystrom_papers.report.printed import LRA_TASKS


def test_tables_engine_and_facts_name_the_same_tasks_in_the_same_order():
    assert tuple(LRA) == LRA_TASKS == tuple(TASKS)


def test_vocabularies_and_classes_are_those_of_the_data():
    for name, split in (("listops", ListOps), ("image", Image), ("pathfinder", Pathfinder)):
        assert (LRA[name].vocab_size, LRA[name].num_labels) == (split.vocab_size, split.num_labels)
    assert LRA["text"].vocab_size == Text.vocab_size == LRA["retrieval"].vocab_size == Retrieval.vocab_size


def test_drawn_data_have_the_published_sizes():
    for name, sizes in (("listops", PUBLISHED_SETTINGS), ("pathfinder", PUBLISHED_SIZES)):
        for split in ("train", "val", "test"):
            assert sizes[split] == getattr(LRA[name], split)
    for end in ("min_length", "max_length"):
        assert getattr(LRA["listops"], end) == PUBLISHED_SETTINGS[end]
