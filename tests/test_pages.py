"""The pages say of the methods and of the tests what the code says."""

import pkgutil
import re
import statistics
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

import nystrom
import nystrom_lab
import nystrom_papers
from nystrom import __version__
from nystrom.attention.registry import METHODS
from nystrom_lab.measure.rows import Row, read_rows
from nystrom_lab.training.presets import PRESETS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_page_and_its_row_in_the_table_to_choose_from(name):
    method = METHODS[name]
    row = (
        f"| [`{name}`](methods/{name}.md) | {method.summary} | {method.cost} | {method.exact_limit} | {method.source} |"
    )
    assert row in (DOCS / "choose.md").read_text(encoding="utf-8").splitlines()
    page = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
    assert f"::: nystrom.attention.methods.{name}\n" in page
    assert f"::: nystrom.attention.options.{method.options.__name__}\n" in page
    assert f"methods/{name}.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", METHODS)
def test_what_a_page_says_a_method_takes_and_cannot_take_is_so(name):
    page = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
    takes, cannot = (
        page.partition(f"- **{word}**")[2].partition("\n- **")[0].partition("\n\n")[0] for word in ("Takes", "Cannot")
    )
    for words, able in (("cross-attention", METHODS[name].cross_attention), ("ranks", METHODS[name].over_ranks)):
        assert (words in takes) == able
        assert able or words in cannot


def test_every_public_name_is_there_and_none_goes_unsaid():
    """`public_names.txt` lists what users may import: a name that leaves it goes into the changelog."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    documented = set(re.findall(r"^::: (nystrom\.\S+)", pages, re.MULTILINE))
    names = sorted(documented | {f"nystrom.{name}" for name in nystrom.__all__})
    assert (Path(__file__).parent / "public_names.txt").read_text(encoding="utf-8").splitlines() == names
    for name in names:
        pkgutil.resolve_name(name)


def test_the_tests_that_hold_a_promise_are_there():
    named = set(re.findall(r"`(test_\w+)`", (DOCS / "promises.md").read_text(encoding="utf-8")))
    there = {
        name
        for file in (*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("packages/*/tests/**/test_*.py"))
        for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert named
    assert named <= there


def test_the_version_is_that_of_the_citation_and_of_the_changelog():
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert newest
    assert newest[1] == __version__ == nystrom_lab.__version__
    needed = tomllib.loads((ROOT / "packages" / "nystrom-lab" / "pyproject.toml").read_text(encoding="utf-8"))
    assert f"nystrom[transformers]=={__version__}" in needed["project"]["dependencies"]
    papers = tomllib.loads((ROOT / "packages" / "nystrom-papers" / "pyproject.toml").read_text(encoding="utf-8"))
    assert nystrom_papers.__version__ == __version__
    assert papers["project"]["dependencies"] == [f"nystrom-lab=={__version__}"]
    assert f"\nversion: {newest[1]}\ndate-released: {newest[2]}\n" in cited


def test_the_page_of_the_library_begins_as_that_of_the_project():
    first, whole = (
        (folder / "README.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
        for folder in (ROOT / "packages" / "nystrom", ROOT)
    )
    assert len(first) > 500
    assert whole.startswith(first)


def test_no_page_draws_data_of_other_sizes_where_a_preset_has_its_own():
    folders = {f"data/{preset.data.folder}" for preset in PRESETS.values()}
    pages = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    drawn = set(re.findall(r"^nystrom data prepare (?=.*--train ).*--to (\S+)", pages, flags=re.MULTILINE))
    assert drawn
    assert not drawn & folders


def test_the_site_opens_from_its_folder():
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    # Links to folders, and to a server, lead nowhere there.
    assert 'site_url: ""\n' in settings
    assert "use_directory_urls: false\n" in settings
    assert "  - offline\n" in settings


def test_every_file_of_rows_is_in_the_list_of_results():
    said = set(re.findall(r"`([\w-]+\.csv)`", (ROOT / "results" / "README.md").read_text(encoding="utf-8")))
    assert {file.name for file in (ROOT / "results").glob("*.csv")} == said


def test_the_tables_of_joined_reviews_are_those_of_the_rows():
    rows = read_rows(ROOT / "results" / "long-documents.csv")
    found = {(row.quantity, row.study.split()[0], row.fact("model"), row.method): row for row in rows}
    guide = (DOCS / "long-documents.md").read_text(encoding="utf-8")
    for shown, model, method in (
        ("the first 512 tokens, exact attention", "short/best", "softmax"),
        ("4,096 tokens, exact attention", "long-softmax-repeat", "softmax"),
        ("4,096 tokens, `near_far`", "long-near_far-repeat", "near_far"),
        ("4,096 tokens, `nystrom-64`", "long-nystrom-repeat", "nystrom-64"),
        ("4,096 tokens, a plan", "long-planned", "nystrom_plan"),
    ):
        before = found["test accuracy", "predict", model, method]
        after, seconds, memory = (
            found[quantity, "finetune", model, method] for quantity in ("test accuracy", "training time", "peak memory")
        )
        numbers = f"{before.value:.1%} | {after.value:.1%} | {seconds.value / 60:.0f} | {memory.value / 1e3:.1f}"
        assert f"| {shown} | {numbers.replace('%', ' %')} |" in guide
        assert all(3 < 100 * max(row.high - row.value, row.value - row.low) < 6 for row in (before, after))


def test_the_tables_of_healings_are_those_of_the_rows():
    runs: dict[str, dict[str, Row]] = {}
    for row in read_rows(ROOT / "results" / "heal.csv"):
        runs.setdefault(row.command, {})[row.quantity] = row
    lines = set()
    for run in runs.values():
        if (steps := run.get("steps")) is None:
            continue
        distance = "distance of embeddings" if "distance of embeddings before" in run else "divergence of the logits"
        cells = [f"`{steps.method}`", f"{steps.n:,}", f"{steps.value * int(steps.facts['batch_size']):.0f}"]
        cells.append(f"{run['processor time'].value / 60:.1f}")
        for quantity, digits in (("held-out error", 3), (distance, 4)):
            before, after = (f"{run[f'{quantity} {when}'].value:.{digits}f}" for when in ("before", "after"))
            cells.append(f"{before.removeprefix('0')} to {after.removeprefix('0')}")
        lines.add(f"| {' | '.join(cells)} |")
    page = (DOCS / "heal.md").read_text(encoding="utf-8")
    shown = {line for line in page.splitlines() if re.match(r"\| `.* to ", line)}
    assert len(shown) >= 6
    assert shown <= lines


def test_the_table_of_exact_heads_with_selected_keys_is_that_of_the_rows():
    rows = read_rows(ROOT / "results" / "heads-selected.csv")
    errors = {(row.facts["model"], row.quantity.partition(", ")[2]): row.value for row in rows}
    page = (DOCS / "inspect.md").read_text(encoding="utf-8")
    for n in (2048, 4096, 8192):
        models, heads = (f"minilm-{n}", f"minilm-{n}-selects"), ("no exact heads", "its own exact heads")
        found = " | ".join(f"{errors[model, which]:.3f}" for model in models for which in heads)
        assert f"| {n:,} | {found} |" in page


def test_the_table_of_heads_that_are_chosen_one_by_one_is_that_of_the_rows():
    cells: dict[tuple[int, str, str], dict[str, Row]] = {}
    for row in read_rows(ROOT / "results" / "heads-chosen.csv"):
        if not row.facts.get("threads"):
            assert row.n is not None
            cells.setdefault((row.n, row.facts["model"], row.command), {})[row.quantity] = row
    page = (DOCS / "inspect.md").read_text(encoding="utf-8")
    for (n, model, _), found in cells.items():
        shares = ", ".join(f"{name[6:]} {row.value:.0%}" for name, row in found.items() if name.startswith("share"))
        errors = (found[f"held-out hidden error, {heads} exact heads"] for heads in ("no", "its own"))
        kinds = {"selects": "with selected keys", "repeat": "without, repeated positions"}
        sizes = kinds.get(model.rpartition("-")[2], "without")
        line = f"| {n:,} | {sizes} | {shares} | {' | '.join(f'{row.value:.3f}' for row in errors)} |"
        assert not shares or line in page


def test_the_summary_of_compared_attentions_has_numbers_of_the_tables_below_and_of_long_documents():
    page = (DOCS / "compare-attentions.md").read_text(encoding="utf-8")
    summary, _, below = page.partition("## Error and time")
    numbers = set(re.findall(r"\d+\.\d+", summary))
    assert len(numbers) >= 5
    below += (DOCS / "long-documents-measured.md").read_text(encoding="utf-8")
    cells = re.findall(r"\d+\.\d+", "\n".join(line for line in below.splitlines() if line.startswith("|")))
    assert numbers <= set(cells)


def test_the_times_beside_other_packages_are_those_of_the_rows():
    rows = read_rows(ROOT / "results" / "efficiency-peers.csv")
    times = {row.method: row.value for row in rows if row.quantity == "forward time"}
    pairs = {
        "linformer-256": "linformer-package-256",
        "longformer-257": "transformers-longformer-257",
        "performer-256": "performer-pytorch-256",
        "reformer-2": "reformer-pytorch-2",
        "bigbird-3": "transformers-bigbird-3",
    }
    line = " | ".join(f"{times[ours] / times[theirs]:.2f}" for ours, theirs in pairs.items())
    assert f"\n| {line} |\n" in (DOCS / "compare-attentions.md").read_text(encoding="utf-8")


def times_of_runs():
    """The times of each method, threads, processes beside and pass, one for each run of the benchmark."""
    times = defaultdict(list)
    for row in read_rows(ROOT / "results/cpu.csv"):
        if row.facts["layout"] == "heads" and row.unit == "ms":
            times[row.method, row.facts["threads"], row.facts.get("beside", ""), row.quantity].append(row.value)
    return times


@pytest.mark.parametrize(
    ("words", "method"),
    [
        ("exact", "softmax"),
        ("`nystrom`, 64 landmarks", "nystrom-64"),
        ("with the skip", "nystrom-64+skip"),
        ("the authors' formula", "authors-64"),
        ("`near_far`", "near_far"),
        ("`near_far`, growing sizes", "near_far-growing"),
        ("`linear`", "linear"),
        ("`performer`, 256 features", "performer-256"),
        ("`skyformer`, 128 landmarks", "skyformer-128"),
    ],
)
def test_times_beside_other_work_are_those_of_the_rows(words, method):
    times = {
        key[1:]: f"{statistics.median(values):,.0f}" for key, values in times_of_runs().items() if key[0] == method
    }
    cells = [
        ", ".join(times.get((threads, beside, f"{timed} time"), "") for timed in ("forward", "forward+backward"))
        for threads in "21"
        for beside in ("", "1")
    ]
    line = " | ".join([words, *("" if cell == ", " else cell for cell in cells)]).replace(" |  |", " | |")
    assert f"| {line} |".replace("  ", " ") in (ROOT / "docs/limits.md").read_text(encoding="utf-8").replace("**", "")


def test_no_method_slows_down_much_more_than_exact_attention_beside_other_work():
    """At most 1.5 times as much is wanted; the page says how much it is."""
    times = times_of_runs()
    ours = {}
    for (method, threads, beside, quantity), values in times.items():
        if beside and not method.startswith("authors"):
            idle, exact = times[method, threads, "", quantity], times["softmax", threads, "", quantity]
            of_exact = times["softmax", threads, beside, quantity]
            each = [x * z / y / w for x, y, z, w in zip(values, idle, exact, of_exact, strict=True)]
            ours[method, threads, quantity] = each
    assert {name.split("-")[0] for name, *_ in ours} == set(METHODS)
    worst, single = max(map(statistics.median, ours.values())), max(map(max, ours.values()))
    assert worst < 1.5
    page = (ROOT / "docs/limits.md").read_text(encoding="utf-8")
    assert f"slows down more than {worst:.2f} times" in page
    assert f"one came to {single:.1f}:" in page
