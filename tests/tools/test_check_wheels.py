"""A wheel that lacks something, or holds what is not of its package, is named."""

from zipfile import ZipFile

import pytest

from tools.check_wheels import main

LACKS = {
    "py.typed": {"nystrom/py.typed": None},
    "its licence": {"nystrom-1.dist-info/licenses/LICENSE": None},
    "nothing but its package": {"nystrom/tests/test_it.py": ""},
    "a README": {"nystrom-1.dist-info/METADATA": "Name: nystrom\nVersion: 1\nLicense-Expression: Apache-2.0\n\n"},
}


def wheel(folder, name, version="1", **changes):
    package, info = name.replace("-", "_"), f"{name.replace('-', '_')}-1.dist-info"
    metadata = f"Name: {name}\nVersion: {version}\nLicense-Expression: Apache-2.0\n\n# {name}\n"
    files = {f"{package}/__init__.py": "", f"{package}/py.typed": "", f"{info}/licenses/LICENSE": ""}
    with ZipFile(folder / f"{package}.whl", "w") as made:
        for path, text in (files | {f"{info}/METADATA": metadata} | changes).items():
            if text is not None:
                made.writestr(path, text)
    return str(folder / f"{package}.whl")


def others(folder, version="1"):
    return [wheel(folder, name, version) for name in ("nystrom-lab", "nystrom-papers")]


def test_all_wheels_are_whole(tmp_path, capsys):
    main([wheel(tmp_path, "nystrom"), *others(tmp_path)])
    assert capsys.readouterr().out == "all wheels of 1 are whole\n"


@pytest.mark.parametrize("what", LACKS)
def test_what_a_wheel_lacks_is_named(what, tmp_path):
    with pytest.raises(SystemExit, match=rf"nystrom\.whl lacks {what}"):
        main([wheel(tmp_path, "nystrom", **LACKS[what]), *others(tmp_path)])


def test_one_wheel_and_two_versions_raise(tmp_path):
    first = wheel(tmp_path, "nystrom")
    for wheels in ([first], [first, *others(tmp_path, version="2")]):
        with pytest.raises(SystemExit, match="a wheel of each distribution, of one version"):
            main(wheels)
