"""A class has one definition and a file of the library a name of its own, so that whoever searches finds one."""

import ast
from collections import Counter, defaultdict
from pathlib import Path

PACKAGES = Path(__file__).parents[2]


def defined_names(tree):
    """Yield each name that a file defines at its top level, and whether it is a class."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name, isinstance(node, ast.ClassDef)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, False


def test_each_public_class_name_means_one_thing():
    files, classes = defaultdict(set), set()
    for path in PACKAGES.glob("*/src/**/*.py"):
        for name, is_class in defined_names(ast.parse(path.read_text(encoding="utf-8"))):
            files[name].add(str(path.relative_to(PACKAGES)))
            if is_class and not name.startswith("_"):
                classes.add(name)
    assert len(classes) > 50, "the package was not found"
    assert {name: sorted(files[name]) for name in classes if len(files[name]) > 1} == {}


def test_each_file_of_the_library_has_a_name_of_its_own():
    names = Counter(path.name for path in (PACKAGES / "nystrom" / "src").glob("**/*.py") if path.name != "__init__.py")
    assert len(names) > 100, "the package was not found"
    assert [name for name, count in names.items() if count > 1] == []
