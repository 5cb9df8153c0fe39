"""Check what the wheels of the distributions hold: `python tools/check_wheels.py WHEEL ...`.

Raises:
    SystemExit: A wheel lacks its package, `py.typed`, licence or README, holds something else, or the versions differ.
"""

import sys
from collections.abc import Sequence
from email.parser import Parser
from pathlib import PurePosixPath
from zipfile import ZipFile, is_zipfile

_PACKAGES = {"nystrom": "nystrom", "nystrom-lab": "nystrom_lab", "nystrom-papers": "nystrom_papers"}


def main(wheels: Sequence[str]) -> None:
    """Check the wheels."""
    versions = {}
    for wheel in wheels:
        if not is_zipfile(wheel):
            sys.exit(f"{wheel} is no wheel.")
        with ZipFile(wheel) as opened:
            paths = [PurePosixPath(name) for name in opened.namelist()]
            (info,) = {path.parts[0] for path in paths if path.parts[0].endswith(".dist-info")}
            metadata = Parser().parsestr(opened.read(f"{info}/METADATA").decode())
        name, package = metadata["Name"], _PACKAGES.get(metadata["Name"], "")
        versions[name] = metadata["Version"]
        strange = [path for path in paths if path.parts[0] not in (package, info) or "tests" in path.parts]
        wanted = {
            "its package": PurePosixPath(package, "__init__.py") in paths,
            "py.typed": PurePosixPath(package, "py.typed") in paths,
            "its licence": PurePosixPath(info, "licenses", "LICENSE") in paths,
            "the expression of its licence": metadata["License-Expression"] == "Apache-2.0",
            "a README": str(metadata.get_payload()).startswith(f"# {name}\n"),
            "nothing but its package": not strange,
        }
        missing = [what for what, is_there in wanted.items() if not is_there]
        if missing:
            sys.exit(f"{wheel} lacks {', '.join(missing)}{f': it holds {strange[0]}' if strange else ''}.")
    if set(versions) != set(_PACKAGES) or len(set(versions.values())) != 1:
        sys.exit(f"expected a wheel of each distribution, of one version; found {versions}.")
    print(f"all wheels of {', '.join(set(versions.values()))} are whole")


if __name__ == "__main__":
    main(sys.argv[1:])
