"""Commands on data: prepare, show, verify, and train a tokenizer on texts."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from nystrom_lab.cli.arguments import call


def _prepare(task: str, module: str, says: str) -> Callable[[list[str]], None]:
    """The command that prepares the data of a task, by a module of `nystrom_lab.data`."""

    def act(words: list[str]) -> None:
        prepare = getattr(import_module(f"nystrom_lab.data.{module}"), f"prepare_{task.replace('-', '_')}")
        print(call(prepare, words, f"data prepare {task}"))

    act.__doc__ = says
    return act


listops = _prepare("listops", "lra.listops.task", "Generate ListOps expressions, or read the published ones.")
text = _prepare("text", "lra.texts.reviews", "Prepare IMDB reviews, or labelled texts of your own, as bytes.")
retrieval = _prepare("retrieval", "lra.texts.retrieval", "Prepare pairs of papers, or of your own texts, as bytes.")
image = _prepare("image", "lra.image", "Prepare CIFAR-10 as grayscale pixels.")
pathfinder = _prepare("pathfinder", "lra.pathfinder.task", "Generate Pathfinder images, or read the published ones.")
mlm_sop = _prepare(
    "mlm-sop", "language.mlm_sop.task", "Prepare raw texts for pretraining on masked words and sentence order."
)


def train_tokenizer_on(words: list[str]) -> None:
    """Train a WordPiece tokenizer on raw texts."""
    from nystrom_lab.data.language.word_pieces import train_tokenizer

    print(call(train_tokenizer, words, "tokenizer train"))


def show_data(words: list[str]) -> None:
    """Show samples of a prepared task."""
    from nystrom_lab.data.show import show

    for shown in call(show, words, "data show", positional="task"):
        print(shown)


def verify_data(words: list[str]) -> None:
    """Compare the files of a prepared folder with their checksums."""
    from nystrom_lab.data.store.prepared_folder import verify

    def verify_folder(folder: Path) -> None:
        """Compare the size and SHA-256 of every file of a prepared folder with the recorded ones.

        Args:
            folder: A folder that `nystrom data prepare` made.
        """
        verify(folder, report=lambda name, problem: print(f"{name:18}  {problem or 'ok'}"))

    call(verify_folder, words, "data verify", positional="folder")
