"""All files of the project are written by the one writer of whole files."""

import ast
from pathlib import Path

PACKAGES = Path(__file__).parents[1] / "packages"
# Functions that write to the path before the dot, or to an argument.
WRITERS = {
    *("write_text", "write_bytes", "savefig", "save_file", "savez", "savez_compressed", "mkstemp", "copyfile", "copy2"),
    *("NamedTemporaryFile", "touch", "symlink_to", "hardlink_to", "link", "renames", "tofile", "to_csv", "to_parquet"),
}
OWNED = {("os", "replace"), ("os", "rename"), ("shutil", "copy"), ("np", "save"), ("torch", "save")}
# A locked file; and the descriptor of an open stream and a switch of the kernel, no files.
GROWING = {
    *(("nystrom_lab/measure/rows.py", "ab+"), ("nystrom_lab/cli/streams.py", "w")),
    ("nystrom_lab/measure/memory.py", "write_text"),
}
# In a folder that `partial_folder` lent, or such a folder itself.
LENT = {
    *(("nystrom_lab/data/store/token_files.py", "wb"), ("nystrom_lab/data/store/prepared_folder.py", "replace")),
    ("nystrom_lab/data/language/word_pieces.py", "replace"),
}


def test_nothing_else_in_the_project_writes_files():
    found = [
        f"{name}:{line} {what}"
        for path in sorted(PACKAGES.glob("*/src/**/*.py"))
        for name, line, what in _written(path)
    ]
    assert not found


def test_what_is_temporary_is_made_where_leftovers_are_removed():
    root = PACKAGES.parent
    # An installation from a folder leaves a copy of the sources in `build` beside them.
    files = [*PACKAGES.glob("*/src/**/*.py"), *root.glob("tools/**/*.py"), *root.glob("examples/**/*.py")]
    assert len(files) > 400
    words = ("tempfile", "mkdtemp", "mkstemp", "TemporaryDirectory")
    found = [
        str(path.relative_to(root)) for path in files if any(word in path.read_text(encoding="utf-8") for word in words)
    ]
    assert found == ["packages/nystrom/src/nystrom/temporary.py"]


def _written(path):
    """Calls in a file that write to a path that the writer did not lend."""
    name = path.relative_to(PACKAGES).as_posix().partition("/src/")[2]
    if name in ("nystrom/temporary.py", "nystrom/whole_files.py", "nystrom_lab/whole_folders.py"):
        return
    lent = {"whole_file", "whole_bytes", "whole_text", "whole_folder", "scratch_folder"}
    lent |= {"temporary_file", "temporary_folder"}

    def walk(node, inside):
        if isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items]
            inside = inside or any(isinstance(call, ast.Call) and _called(call) in lent for call in calls)
        if isinstance(node, ast.Call) and not inside and (what := _writes(node)):
            yield node.lineno, what
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    for line, what in walk(ast.parse(path.read_text(encoding="utf-8")), inside=False):
        if (name, what) not in GROWING | LENT:
            yield name, line, what


def _called(call):
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _writes(call):
    """The mode or name of a call that writes a file; None for another."""
    called = _called(call)
    if called == "open":
        words = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
        modes = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        return next((mode for mode in modes if set(mode) & set("wax+") and set(mode) <= set("wax+bt")), None)
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if called in WRITERS or (getattr(owner, "id", ""), called) in OWNED:
        return called
    # A path's; a string's has two arguments, a data class's has keywords.
    moves = owner and called in ("replace", "rename") and len(call.args) == 1 and not call.keywords
    return called if moves else None
