"""The software versions of a run."""

import importlib.metadata
import platform

from nystrom import __version__


def versions() -> dict[str, str]:
    """The versions of Python, of this library, installed or not, and of its training dependencies."""
    packages = ("torch", "transformers", "accelerate")
    mine = {"python": platform.python_version(), "nystrom": __version__}
    return mine | {name: importlib.metadata.version(name) for name in packages}
