"""Commands on data: prepare, show, verify, and train a tokenizer on texts."""

from pathlib import Path

from nystrom_lab.cli.arguments import arguments_of, from_option, positional


def prepare_listops_data(words: list[str]) -> None:
    """Generate ListOps expressions, or read the published ones."""
    from nystrom_lab.data.lra.listops.task import prepare_listops as prepare

    print(prepare(**arguments_of(prepare, words, "data prepare listops", source=from_option(prepare))))


def prepare_text_files(words: list[str]) -> None:
    """Prepare IMDB reviews, or labelled texts of your own, as bytes."""
    from nystrom_lab.data.lra.texts.reviews import prepare_text

    print(prepare_text(**arguments_of(prepare_text, words, "data prepare text", source=from_option(prepare_text))))


def prepare_retrieval_files(words: list[str]) -> None:
    """Prepare pairs of papers, or of your own texts, as bytes."""
    from nystrom_lab.data.lra.texts.retrieval import prepare_retrieval as prepare

    print(prepare(**arguments_of(prepare, words, "data prepare retrieval", source=from_option(prepare))))


def prepare_image_files(words: list[str]) -> None:
    """Prepare CIFAR-10 as grayscale pixels."""
    from nystrom_lab.data.lra.image import prepare_image

    print(prepare_image(**arguments_of(prepare_image, words, "data prepare image", source=from_option(prepare_image))))


def prepare_pathfinder_data(words: list[str]) -> None:
    """Generate Pathfinder images, or read the published ones."""
    from nystrom_lab.data.lra.pathfinder.task import prepare_pathfinder as prepare

    print(prepare(**arguments_of(prepare, words, "data prepare pathfinder", source=from_option(prepare))))


def prepare_mlm_sop_texts(words: list[str]) -> None:
    """Prepare raw texts for pretraining on masked words and sentence order."""
    from nystrom_lab.data.language.mlm_sop.task import prepare_mlm_sop as prepare

    print(prepare(**arguments_of(prepare, words, "data prepare mlm-sop", source=from_option(prepare))))


def train_tokenizer_on(words: list[str]) -> None:
    """Train a WordPiece tokenizer on raw texts."""
    from nystrom_lab.data.language.word_pieces import train_tokenizer as train

    print(train(**arguments_of(train, words, "tokenizer train", source=from_option(train))))


def show_data(words: list[str]) -> None:
    """Show samples of a prepared task."""
    from nystrom_lab.data.show import show

    for shown in show(**arguments_of(show, words, "data show", task=positional(show, "task"))):
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

    verify_folder(**arguments_of(verify_folder, words, "data verify", folder=positional(verify_folder, "folder")))
