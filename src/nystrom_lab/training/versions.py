"""The versions that a run was made with."""

import importlib.metadata
import platform

from nystrom import __version__


def versions() -> dict[str, str]:
    """Those of Python, of this library, installed or not, and of what it trains with."""
    packages = ("torch", "transformers", "accelerate")
    mine = {"python": platform.python_version(), "nystrom": __version__}
    return mine | {name: importlib.metadata.version(name) for name in packages}
