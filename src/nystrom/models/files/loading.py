"""What must hold before and after the weights of a folder go into a model.

Before: there are safetensors, whole, and no other kind is opened. A pickle (pytorch_model.bin and its kind) can run any
code when it is loaded. After: the encoder's weights are all in the model and none is left over, and each head is whole
or wholly new. A new head is how fine-tuning starts, and transformers reports it; half a head means a broken file.

Some of the published checkpoints have no safetensors in the main revision of their repository, but in `refs/pr/1`, the
conversion that Hugging Face proposes. For them, and where no revision was asked for, that one is taken, with a warning.
For any other model the error names it, since a proposal is not its owner's word.
"""

import logging
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from nystrom.models.files.json_object import read_json
from nystrom.models.memory import least_weights
from nystrom.sums import check_sums

# The sizes in a config.json by the names that families give them: layers, width, inside the feed-forward blocks,
# vocabulary, and the width of its vectors.
_SIZES = (
    ("num_hidden_layers", "n_layers"),
    ("hidden_size", "dim"),
    ("intermediate_size", "hidden_dim"),
    ("vocab_size",),
    ("embedding_size", "hidden_size", "dim"),
)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# The modules of the heads, here and in transformers' Nyströmformer; all other weights belong to the encoder.
_HEADS = ("cls", "sop", "classifier", "pre_classifier", "qa_outputs")
_OF_DOWNLOAD = ("cache_dir", "force_download", "local_files_only", "revision", "token")
_PUBLISHED = "uw-madison/nystromformer-"
_CONVERTED = "refs/pr/1"


class SizeMismatchError(ValueError, RuntimeError):
    """Weights of other sizes than the configuration says; transformers raises a RuntimeError for them."""


def find_folder(name: Any, given: dict[str, Any]) -> Path:
    """The folder of a model; a model of the Hugging Face Hub is downloaded.

    Args:
        name: A folder, or a name such as "uw-madison/nystromformer-512".
        given: Keywords of `from_pretrained`; those about downloads are used.

    Raises:
        ValueError: A file, or neither a folder nor a possible name; or a model that has no safetensors.
        OSError: The hub has no such model, or cannot be reached.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if path.is_file():
        raise ValueError(f"model is the file {path}; expected the folder that holds it, with its config.json.")
    if path.is_absolute() or len(path.parts) != 2 or path.parts[0] in (".", ".."):
        raise ValueError(
            f"model is {str(name)!r}; expected a folder, or OWNER/NAME of a model on the Hugging Face Hub."
        )
    stem = "model" if given.get("variant") is None else f"model.{given['variant']}"
    wanted = [f"{stem}.safetensors", f"{stem}-*.safetensors", "model.safetensors.index*.json", "*config.json"]
    inside = given.get("subfolder") or ""
    options: dict[str, Any] = {key: given[key] for key in _OF_DOWNLOAD if given.get(key) is not None}
    patterns = [f"{inside}/{pattern}" if inside else pattern for pattern in wanted]
    try:
        folder = Path(snapshot_download(str(name), allow_patterns=patterns, **options))
    except RepositoryNotFoundError as error:
        raise OSError(
            f"model {name} is no folder here, and the Hugging Face Hub has none of this name that you may read: check "
            "the name, or log in (hf auth login)."
        ) from error
    except LocalEntryNotFoundError as error:
        raise OSError(
            f"model {name} is no folder here, not in the cache, and the Hugging Face Hub cannot be reached: name a "
            f"folder, or download it where there is a network (hf download {name} --local-dir FOLDER)."
        ) from error
    if "revision" in options or not str(name).startswith(_PUBLISHED) or any((folder / inside).glob("*.safetensors")):
        return folder
    options["revision"] = _CONVERTED
    try:
        converted = Path(snapshot_download(str(name), allow_patterns=patterns, **options))
    except (RevisionNotFoundError, LocalEntryNotFoundError):
        return folder
    warnings.warn(
        f"model {name} has no safetensors in its main revision: {_CONVERTED} is loaded, where Hugging Face converted "
        f'them. Pass revision="{_CONVERTED}" to choose it yourself.',
        UserWarning,
        stacklevel=3,
    )
    return converted


def check_weights(folder: Path, *, variant: str | None = None, downloaded: bool = False) -> None:
    """Check that a folder holds whole safetensors; of each file only the header is read, unless it recorded its sums.

    Args:
        folder: Where config.json is.
        variant: The variant of `from_pretrained`.
        downloaded: It is the main revision of a model of the hub, where another may hold them.

    Raises:
        ValueError: No folder; no weights, other kinds alone, a file that is missing, cut off or elsewhere, or a
            config.json of a far larger model.
    """
    if not folder.is_dir():
        raise ValueError(f"model is {folder}, which is no folder; expected one with config.json and safetensors.")
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"model {folder} holds an adapter (adapter_config.json): load the model that it was made for, then the "
            "adapter with peft.PeftModel.from_pretrained(model, folder)."
        )
    one, index = SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME
    if variant is not None:
        one, index = f"model.{variant}.safetensors", f"model.safetensors.index.{variant}.json"
    if (folder / one).is_file():
        names: Iterable[str] = [one]
    elif (folder / index).is_file():
        places = read_json(folder / index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
            raise ValueError(f"{folder / index} has no weight_map of file names: save the model again.")
        names = sorted(set(places.values()))
    else:
        elsewhere = (
            " If its page on the hub lists a conversion to safetensors as a pull request, pass that as the revision, "
            f'such as revision="{_CONVERTED}".'
        )
        raise ValueError(f"model {folder} {_why_none(folder, one)}{elsewhere if downloaded else ''}")
    weights = 0
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{folder / index} names {name!r}; expected safetensors files beside it.")
        if not (folder / name).is_file():
            raise ValueError(f"model {folder} lacks {name}, which {index} names: save or fetch the model again.")
        try:
            with safe_open(folder / name, framework="pt") as file:
                weights += sum(prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118 (no dict)
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{folder / name} is no safetensors file, or is cut off ({error}): save or fetch the model again."
            ) from error
    if (folder / CONFIG_NAME).is_file():
        _check_sizes(folder, read_json(folder / CONFIG_NAME), weights)
    check_sums(folder)


def _check_sizes(folder: Path, content: Mapping[str, Any], weights: int) -> None:
    """Raise ValueError for sizes that would take a model far beyond the weights of its folder, before it is made."""
    layers, width, inside, words, vectors = (
        next((content[name] for name in names if isinstance(content.get(name), int)), 1) for names in _SIZES
    )
    if "num_hidden_groups" in content:
        # ALBERT's layers share their weights.
        layers = 1
    body = least_weights(layers=layers, width=width, intermediate=inside, vocabulary=0)
    # A quarter, for blocks of a matrix that are not stored, as in SqueezeBERT, and for packed weights.
    least = (body + words * vectors) // 4
    if least > weights:
        raise ValueError(
            f"model {folder} does not fit its config.json, whose {layers:,} layers of width {width:,}, {inside:,} "
            f"inside and {words:,} tokens would have more than {least:,} weights where its files hold {weights:,}: "
            "save or fetch the model again."
        )


def check_fit(model: nn.Module, report: dict[str, Any], folder: Path, *, new_heads: bool = True) -> None:
    """Check that a model's encoder and head are wholly what its folder holds.

    Args:
        model: The loaded model.
        report: What transformers gives with `output_loading_info`.
        folder: Where it came from.
        new_heads: A head may be wholly new, and one that the model does not have may be left behind.

    Raises:
        ValueError: The first weight that is missing or left over.
    """
    missing, extra = set(report["missing_keys"]), set(report["unexpected_keys"])
    own = {name for name in model.state_dict() if name not in getattr(model, "all_tied_weights_keys", ())}
    whole = {head for head in _HEADS if not _within(head, own) - missing} if new_heads else ()
    misfit = [name for name in sorted(missing | extra) if _top(name) not in whole]
    if misfit:
        kind = type(model).__name__
        problem = f"which {kind} has and it lacks" if misfit[0] in missing else f"for which {kind} has no place"
        raise ValueError(
            f"model {folder} does not fit its config.json, for example in {misfit[0]}, {problem}: save it again, or "
            "load it with the class that saved it."
        )


@contextmanager
def report_held() -> Iterator[None]:
    """Hold back what transformers logs of weights until it is checked; where they do not fit, the error says it."""
    log, held = logging.getLogger("transformers.modeling_utils"), []

    def hold(record: logging.LogRecord) -> bool:
        held.append(record)
        return False

    log.addFilter(hold)
    try:
        yield
    finally:
        log.removeFilter(hold)
    for record in held:
        log.handle(record)


def check_shapes(report: Mapping[str, Any], folder: Path) -> None:
    """Check that the weights of a folder have the sizes of its model.

    Args:
        report: What transformers gives with `output_loading_info` and `ignore_mismatched_sizes`.
        folder: Where the model came from.

    Raises:
        SizeMismatchError: The first that has not, by name.
    """
    for name, came, wanted in sorted(report["mismatched_keys"]):
        raise SizeMismatchError(
            f"model {folder} has weights of other sizes than its config.json says, for example {name} of shape "
            f"{tuple(came)} where it says {tuple(wanted)}: save or fetch the model again, or pass "
            "ignore_mismatched_sizes=True for a new head of another size."
        )


def check_encoder(model: Any, report: Mapping[str, Any], folder: Path, *, new_heads: bool) -> None:
    """Check that all of an encoder of transformers came from its folder; a pooler may be new.

    Args:
        model: The loaded model.
        report: What transformers gives with `output_loading_info` and `ignore_mismatched_sizes`.
        folder: Where it came from.
        new_heads: A head may be new, too.

    Raises:
        ValueError: The first weight that is missing, left over or of another size.
    """
    prefix = f"{model.base_model_prefix}."
    lacking = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    for name in sorted(lacking | set(report["unexpected_keys"])):
        inside = name.removeprefix(prefix)
        whole = name in lacking and (model.base_model is model or not new_heads)
        if (whole or name.startswith(prefix) or ".layer." in name) and not inside.startswith("pooler."):
            raise ValueError(
                f"model {folder} does not fit its config.json, for example in {name}: save or fetch the model again."
            )


def check_tied(model: nn.Module, tied: dict[str, str] | None, folder: Path) -> None:
    """Check that tensors which the configuration ties have one value in the folder.

    Raises:
        ValueError: The first that has two.
    """
    for name, source in (tied or {}).items():
        if model.get_parameter(name) is not model.get_parameter(source):
            raise ValueError(
                f"model {folder} holds different values for {name} and {source}, which tie_word_embeddings=True makes "
                "one: pass tie_word_embeddings=False to keep both."
            )


def _top(name: str) -> str:
    first, _, rest = name.partition(".")
    return rest.partition(".")[0] if first == "nystromformer" else first


def _within(head: str, names: Collection[str]) -> set[str]:
    return {name for name in names if _top(name) == head}


def _why_none(folder: Path, wanted: str) -> str:
    for pattern in _PICKLES:
        for pickle in sorted(folder.glob(pattern)):
            return (
                f"holds no {wanted}: only that format is read, since it runs no code, and {pickle.name} can run any. "
                "Where you trust it, convert it in a place where it can do no harm, with transformers alone: "
                "AutoModelForMaskedLM.from_pretrained(FOLDER).save_pretrained(OTHER), or the class of its head."
            )
    return f"holds no {wanted}: only that format is read, since it runs no code."
