"""Checks before and after loading the weights of a folder.

Before: complete safetensors of finite numbers exist; no other format is opened, since a pickle (such as
pytorch_model.bin) can run arbitrary code when it is loaded. After: all weights of the encoder were loaded and none is
left over, and each head is complete or entirely new. A new head is how fine-tuning starts, and transformers reports it;
half a head means a broken file.

Some of the published checkpoints have no safetensors in the main revision of their repository, only in `refs/pr/1`, the
conversion proposed by Hugging Face. For these, if no revision is requested, that one is used, with a warning. For any
other model the error only mentions it, since its owner has not accepted the proposal.
"""

import logging
import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from nystrom.input_files import check_model, check_model_folder
from nystrom.json_files import read_json
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
# Numbers up to which torch computes in the thread that asks (at::internal::GRAIN_SIZE).
_GRAIN = 2**15


class SizeMismatchError(ValueError, RuntimeError):
    """Weights whose sizes contradict the configuration; transformers raises a RuntimeError for them."""


def find_folder(name: Any, given: dict[str, Any]) -> Path:
    """The folder of a model; one of the Hugging Face Hub is downloaded, by what `given` of `from_pretrained` says of
    that.

    Raises:
        ValueError: A file, or neither a folder nor a valid name; or a model without safetensors.
        OSError: The hub has no such model, or cannot be reached.
    """
    path = Path(name)
    if path.is_dir():
        return path
    check_model(name)
    stem = "model" if given.get("variant") is None else f"model.{given['variant']}"
    wanted = [f"{stem}.safetensors", f"{stem}-*.safetensors", "model.safetensors.index*.json", "*config.json"]
    inside = given.get("subfolder") or ""
    options: dict[str, Any] = {key: given[key] for key in _OF_DOWNLOAD if given.get(key) is not None}
    patterns = [f"{inside}/{pattern}" if inside else pattern for pattern in wanted]
    try:
        folder = Path(snapshot_download(str(name), allow_patterns=patterns, **options))
    except RepositoryNotFoundError as error:
        raise OSError(
            f"model {name} is not a local folder, and the Hugging Face Hub has no model of this name that you may "
            "read: check the name, or log in (hf auth login)."
        ) from error
    except LocalEntryNotFoundError as error:
        raise OSError(
            f"model {name} is not a local folder, not in the cache, and the Hugging Face Hub cannot be reached: name a "
            f"folder, or download it with network access (hf download {name} --local-dir FOLDER)."
        ) from error
    if "revision" in options or not str(name).startswith(_PUBLISHED) or any((folder / inside).glob("*.safetensors")):
        return folder
    options["revision"] = _CONVERTED
    try:
        converted = Path(snapshot_download(str(name), allow_patterns=patterns, **options))
    except (RevisionNotFoundError, LocalEntryNotFoundError):
        return folder
    warnings.warn(
        f"model {name} has no safetensors in its main revision: {_CONVERTED} is loaded, in which Hugging Face "
        "converted "
        f'them. Pass revision="{_CONVERTED}" to choose it yourself.',
        UserWarning,
        stacklevel=3,
    )
    return converted


def check_weights(folder: Path, *, variant: str | None = None, downloaded: bool = False) -> None:
    """Check that a folder holds complete safetensors of finite numbers, of the `variant` if one is given.

    `downloaded` is the main revision of a hub model, of which another revision may hold safetensors.

    Raises:
        ValueError: Not a folder; no weights, or only in other formats; a file that is missing, truncated or elsewhere;
            a config.json of a far larger model; or a weight or buffer that is NaN or infinite.
        OSError: A file may not be read.
    """
    check_model_folder(folder)
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
        # A file that may not be read is not damaged; safetensors tells both alike.
        with (folder / name).open("rb"):
            pass
        try:
            with safe_open(folder / name, framework="pt") as file:
                weights += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118 (no dict)
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{folder / name} is not a safetensors file, or is truncated ({error}): save or fetch the model again."
            ) from error
    if (folder / CONFIG_NAME).is_file():
        _check_sizes(folder, read_json(folder / CONFIG_NAME), weights)
    check_sums(folder)
    for name in names:
        _check_finite(folder / name)


def _check_finite(path: Path) -> None:
    """Raise ValueError for a file with a number that is NaN or infinite."""
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 (no dict)
            tensor = file.get_tensor(key)
            if tensor.is_floating_point() and not _is_finite(tensor):
                raise ValueError(
                    f"{path} holds numbers that are not finite, for example in {key}: its training diverged, or "
                    "the file is damaged; train or fetch the model again."
                )


def _is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite, found in this thread alone.

    Larger pieces would start the threads of OpenMP, and a process that has them cannot be forked: a server that loads
    the model before it forks would have workers that wait for ever.
    """
    for piece in tensor.flatten().split(_GRAIN):
        # Both ends are NaN if one number is; torch computes no ends in 8 bits.
        ends = (piece.float() if piece.element_size() == 1 else piece).aminmax() if piece.numel() else ()
        if not all(map(math.isfinite, ends)):
            return False
    return True


def _check_sizes(folder: Path, content: Mapping[str, Any], weights: int) -> None:
    """Raise ValueError, before building it, for a config.json of a model far larger than the weights of its folder."""
    layers, width, inside, words, vectors = (
        next((content[name] for name in names if isinstance(content.get(name), int)), 1) for names in _SIZES
    )
    if "num_hidden_groups" in content:
        # ALBERT's layers share their weights.
        layers = 1
    # A quarter, for blocks of a matrix that are not stored, as in SqueezeBERT, and for packed weights.
    least = (2 * layers * width * inside + words * vectors) // 4
    if least > weights:
        raise ValueError(
            f"model {folder} does not fit its config.json, whose {layers:,} layers of width {width:,}, {inside:,} "
            f"inside and {words:,} tokens would have more than {least:,} weights where its files hold {weights:,}: "
            "save or fetch the model again."
        )


def check_fit(model: nn.Module, report: dict[str, Any], folder: Path, *, new_heads: bool = True) -> None:
    """Check that a model's encoder and head match the contents of its folder, by the loading report of transformers.

    With `new_heads`, a head may be entirely new, and a head that the model does not have may be dropped.

    Raises:
        ValueError: The first weight that is missing or left over.
    """
    missing, extra = set(report["missing_keys"]), set(report["unexpected_keys"])
    own = {name for name in model.state_dict() if name not in getattr(model, "all_tied_weights_keys", ())}
    whole = {head for head in _HEADS if not _within(head, own) - missing} if new_heads else ()
    misfit = [name for name in sorted(missing | extra) if _top(name) not in whole]
    if misfit:
        kind = type(model).__name__
        problem = f"which {kind} has and it lacks" if misfit[0] in missing else f"which {kind} does not have"
        raise ValueError(
            f"model {folder} does not fit its config.json, for example in {misfit[0]}, {problem}: save it again, or "
            "load it with the class that saved it."
        )


@contextmanager
def report_held() -> Iterator[None]:
    """Hold back transformers' messages about weights until they are checked; an error replaces them on a mismatch."""
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
    """Raise SizeMismatchError for the first weight in a loading report whose size is not what its model expects.

    The report is transformers' `output_loading_info` with `ignore_mismatched_sizes`.
    """
    for name, came, wanted in sorted(report["mismatched_keys"]):
        raise SizeMismatchError(
            f"model {folder} has weights of other sizes than its config.json says, for example {name} of shape "
            f"{tuple(came)} where it says {tuple(wanted)}: save or fetch the model again, or pass "
            "ignore_mismatched_sizes=True for a new head of another size."
        )


def check_tied(model: nn.Module, tied: dict[str, str] | None, folder: Path) -> None:
    """Raise ValueError for the first pair of tensors, tied by the configuration, that differ in the folder."""
    for name, source in (tied or {}).items():
        if model.get_parameter(name) is not model.get_parameter(source):
            raise ValueError(
                f"model {folder} holds different values for {name} and {source}, which tie_word_embeddings=True ties: "
                "pass tie_word_embeddings=False to keep both."
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
                f"holds no {wanted}: only that format is read, since it cannot run code, and {pickle.name} can. "
                "If you trust it, convert it in a sandbox with transformers alone: "
                "AutoModelForMaskedLM.from_pretrained(FOLDER).save_pretrained(OTHER), or the class of its head."
            )
    return f"holds no {wanted}: only that format is read, since it cannot run code."
