"""A quantity that several pages tell has one value in all of them, that of its rows."""

import re
from pathlib import Path

import pytest

from nystrom_lab.measure.rows import read_rows

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OUTPUT = "relative error of the output"
NUMBER = r"(\d[\d,]*(?:\.\d+)?)"


def value(file, quantity, method, n=None, **facts):
    """The one value in a file of results/."""
    (found,) = {
        row.value
        for row in read_rows(ROOT / "results" / file)
        if (row.quantity, row.method) == (quantity, method)
        and n in (None, row.n)
        and all(row.fact(name) == text for name, text in facts.items())
    }
    return found


def faster_from(method, file="long-inputs.csv"):
    """The shortest length from which on a forward pass, of whole encoders, takes at most .95 of exact attention's."""
    times = {
        (row.method, row.n): row.value
        for row in read_rows(ROOT / "results" / file)
        if row.quantity == "forward time" and row.fact("of") in ("", "encoder")
    }
    lengths = sorted(n for name, n in times if name == method and n)
    slower = [n for n in lengths if times[method, n] > 0.95 * times["softmax", n]]
    return f"{min(n for n in lengths if n > max(slower)):,}"


def ahead_from(method):
    """The shortest length from which on a method takes at most .95 of the time of the fastest exact engine."""
    rows = [row for row in read_rows(ROOT / "results" / "engines.csv") if row.method == method]
    beside = {row.n or 0: row.value for row in rows if row.quantity == "time / fastest exact engine"}
    slower = [n for n, ratio in beside.items() if ratio > 0.95]
    return f"{min(n for n in beside if n > max(slower, default=0)):,}"


def beside_exact(file, method, n):
    return value(file, "forward time", method, n) / value(file, "forward time", "softmax", n)


def error(method, n=8192):
    return f"{value('long-inputs.csv', OUTPUT, method, n):.2f}"


def bias(method, quantity, n):
    return value("position-bias.csv", quantity, method, n)


def whole_model_on_a_gpu(pick):
    rows = [row for row in read_rows(ROOT / "results" / "gpu-model.csv") if row.quantity.endswith(" time")]
    exact = {(row.quantity, row.n): row.value for row in rows if row.method == "softmax"}
    return f"{pick(row.value / exact[row.quantity, row.n] for row in rows if 'triton' in row.method):.1f}"


def prose(page):
    """A page in one line, without blocks of code and without tables that commands print."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```|<!-- (?:nystrom|python) .*?<!-- end -->", "", text, flags=re.MULTILINE | re.DOTALL)
    return " ".join(text.split())


# The sentences that tell a quantity, with {} for its number, and its value by the rows; all pages are searched.
QUANTITIES = {
    "near_far: length from which an encoder is faster": (
        [
            r"(?:tokens, and is faster|gains time|beats fused exact attention) from {} tokens",
            r"from 1,024 tokens, `near_far` from {} \|",
            r"vision transformer, from about {} patches",
        ],
        faster_from("near_far"),
    ),
    "nystrom-64: length from which an encoder is faster": (
        [r"fewer than {} tokens \| exact attention", r"with 64 landmarks(?: and skip)? from {}[ ;]"],
        faster_from("nystrom-64"),
    ),
    "near_far: length from which it is ahead of the fastest exact engine": (
        [r"ahead of every exact engine: from {} tokens", r"faster from {} tokens than every exact engine"],
        ahead_from("near_far"),
    ),
    "nystrom: length from which attention alone is faster on a GPU": (
        [r"alone is faster from {} tokens with `nystrom`", r"the kernels win from {} or"],
        faster_from("nystrom-triton-64", "gpu-lengths.csv"),
    ),
    "near_far: length from which attention alone is faster on a GPU": (
        [r"with `nystrom`, from {} tokens with `near_far`", r"the kernels win from [\d,]+ or {} tokens"],
        faster_from("near_far-triton", "gpu-lengths.csv"),
    ),
    "causal near_far: forward time at 8,192": (
        [
            r"causal forward pass takes {} of the time of fused exact",
            r"forward pass takes {} of the time of fused causal",
        ],
        f"{value('gallery/causal-language.csv', 'forward time / exact', 'near_far', 8192):.2f}",
    ),
    "causal near_far: time of a training step at 8,192": (
        [r"training step {}\. Up to 4,096", r"training step {}, with two threads"],
        f"{value('gallery/causal-language.csv', 'training time / exact', 'near_far', 8192):.2f}",
    ),
    "listops, exact attention": (
        [r"standard error 1\.1 \| \| \|---\|---:\| \| exact attention \| {} \|"],
        f"{100 * value('lra-listops.csv', 'test accuracy', 'softmax'):.1f}",
    ),
    "a whole model on a GPU, at least": ([r"takes {} to \d\.\d times its time"], whole_model_on_a_gpu(min)),
    "a whole model on a GPU, at most": ([r"takes \d\.\d to {} times its time"], whole_model_on_a_gpu(max)),
    "near_far with fixed sizes, error at 4,096": (
        [r"`near_far` with fixed sizes {}, `nystrom`", r"48 heavy keys and 64 clusters \| 0\.\d+ \| {} \|"],
        f"{value('gallery/near-far.csv', OUTPUT, 'near_far', 4096):.3f}",
    ),
    "nystrom with 256 landmarks, error at 4,096": (
        [r"`nystrom` with 256 landmarks {} ", r"`nystrom`, 256 landmarks \| 0\.\d+ \| {} \|"],
        f"{value('gallery/near-far.csv', OUTPUT, 'nystrom-256', 4096):.3f}",
    ),
    "near_far with growing sizes, error at 8,192": (
        [r"\| exact \| exact \| 0\.10 \| 0\.11 \| {} \|"],
        error("near_far"),
    ),
    "nystrom-64, two layers of BERT-base's width at 8,192": (
        [r"64 landmarks and skip: equal at 512 tokens, {} times faster"],
        f"{1 / beside_exact('model.csv', 'nystrom-64+skip', 8192):.1f}",
    ),
    "nystrom-64, error at 8,192": ([r"at 8,192 tokens the error is {} with 64"], error("nystrom-64")),
    "text, 4,000 bytes": (
        [r"20,000 steps, one seed \| {} \|"],
        f"{100 * value('lra-text-4000-full.csv', 'test accuracy', 'nystrom-64+skip'):.1f}",
    ),
    "text, 1,000 bytes": (
        [r"20,000 steps, one seed \| \d+\.\d \| {} \|"],
        f"{100 * value('lra-text.csv', 'test accuracy', 'nystrom-64+skip'):.1f}",
    ),
    **{
        f"near_far with buckets, {what} at {n:,}": (
            [pattern],
            f"{bias('near_far, buckets', f'{what} time / near_far', n):.2f}",
        )
        for what, n, pattern in (
            ("forward", 2048, r"12 heads of 64 \|[^|]*\|[^|]*\| \|(?:-+:?\|)+ \| forward \| {} \|"),
            ("forward", 8192, r"forward \| \d\.\d+ \| {} \| \| forward and backward, with the gradient of the table"),
            ("training", 2048, r"with the gradient of the table \| {} \|"),
            ("training", 8192, r"with the gradient of the table \| \d\.\d+ \| {} \|"),
        )
    },
    "near_far with buckets, memory of a layer of ProtT5's shape": (
        [r"35,213 residues \| {} \|"],
        f"{bias('near_far, buckets', 'forward peak memory', 35_213) / 1e3:.2f}",
    ),
    "near_far with ALiBi, memory of a layer of TITAN's shape": (
        [r"20,000 tiles \| {} \|"],
        f"{bias('near_far, ALiBi in 2-D', 'forward peak memory', 20_000) / 1e3:.2f}",
    ),
    "near_far with ALiBi, time of a layer of TITAN's shape": (
        [r"20,000 tiles \| \d\.\d+ \| {}, in one run"],
        f"{bias('near_far, ALiBi in 2-D', 'forward time / exact, ALiBi in 2-D', 20_000):.2f}",
    ),
    **{
        f"error on trained heads with a bias, {method} at {n:,}": (
            [pattern],
            f"{bias(method, 'relative error of the output, mean of the layers', n):.2f}",
        )
        for method, row in (
            ("near_far, far bias by side", r"as the library has it"),
            ("near_far, no far bias", r"no bias of far keys"),
            ("near_far, no bias", r"no bias at all"),
            ("nystrom-64, mean bias of segments", r"with the mean bias of segments"),
            ("nystrom-64, no bias", r"`nystrom-64`, no bias"),
        )
        for n, pattern in ((2048, row + r" \| {} \|"), (4096, row + r" \| \d\.\d+ \| {} \|"))
    },
    **{
        f"error of hidden states with a bias at {n:,}": (
            [pattern],
            f"{bias('near_far, far bias by side', 'relative error of the hidden states', n):.2f}",
        )
        for n, pattern in ((2048, r"with `near_far` err by {} and"), (4096, r"with `near_far` err by \d\.\d+ and {}\."))
    },
}


# Sentences that a second page may contradict: from how many tokens on something is faster, by how much, and errors; an
# error "above" a number is a threshold, which nobody measured.
FORMS = (
    r"(?:faster|ahead|slower|beats?|wins?|gains?|exact attention)\b[^.|]{0,90}? from (?:about )?\d",
    r"fewer than (?:about )?\d[\d,]* tokens \| exact",
    r"\d times (?:faster|slower) than",
    r"\b(?:errors?|off|differs?)\b(?! above)[^.;|]{0,80}?(?<![\d.])0?\.\d+",
)
# Pages of one measurement each, which other tests hold to its rows.
OWN_ROWS = re.compile(r"-measured|compare-attentions|gallery|inspect|heal|methods/|long-range-arena")


@pytest.mark.parametrize("page", [page for page in PAGES if not OWN_ROWS.search(str(page))], ids=lambda page: page.name)
def test_a_sentence_that_a_second_page_may_contradict_tells_a_quantity_of_the_list(page):
    text = prose(page)
    told = [
        found.span()
        for patterns, _ in QUANTITIES.values()
        for pattern in patterns
        for found in re.finditer(pattern.replace("{}", NUMBER), text)
    ]
    for form in FORMS:
        for found in re.finditer(form, text):
            assert any(begin < found.end() and found.start() < end for begin, end in told), (
                f"QUANTITIES does not have: {text[found.start() - 80 : found.end() + 80]}"
            )


@pytest.mark.parametrize("name", QUANTITIES)
def test_a_quantity_that_is_told_twice_has_one_value_that_of_the_rows(name):
    patterns, wanted = QUANTITIES[name]
    said = {}
    for page in PAGES:
        text = prose(page)
        for place, pattern in enumerate(patterns):
            for number in re.findall(pattern.replace("{}", NUMBER), text):
                said[page.relative_to(ROOT), place] = number
    assert {place for _, place in said} == set(range(len(patterns))), said
    assert set(said.values()) == {wanted}, said


def estimates_table():
    """The table of docs/inspect.md, of the rows of named-error.csv."""
    near, within, monitored = "near_far", "near_far, tolerance 0.1", "near_far, monitored"
    above = "share of layers and papers with an error above 0.12"
    wanted = [
        (
            "estimate / error, nine of ten layers",
            "estimated error / error, all layers",
            near,
            "{0.low:.2f} to {0.high:.2f}",
        ),
        (
            "estimate / error, nine of ten heads",
            "estimated error / error, all heads",
            near,
            "{0.low:.2f} to {0.high:.2f}",
        ),
        ("layers whose error is above 0.12", above, near, "{0.value:.0%}"),
        ("the same with `tolerance=0.1`", above, within, "{0.value:.0%}"),
        ("heads that attend exactly with it", "share of heads that attend exactly", within, "{0.value:.0%}"),
        (
            "time of the model, with `monitor_errors` / without",
            "processor time / not monitored",
            monitored,
            "{0.value:.2f}",
        ),
    ]
    rows = {(row.quantity, row.method, row.n): row for row in read_rows(ROOT / "results" / "named-error.csv")}
    lengths = sorted({row.n for row in rows.values()})
    lines = [["", *(f"{n:,} tokens" for n in lengths)], ["---", *["---:"] * len(lengths)]]
    lines += [
        [name, *(said.format(rows[quantity, method, n]) for n in lengths)] for name, quantity, method, said in wanted
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_the_table_of_estimated_errors_is_that_of_the_rows():
    page = (ROOT / "docs" / "inspect.md").read_text(encoding="utf-8")
    table = page.partition("<!-- numbers of named-error.csv -->")[2].partition("<!-- end of numbers -->")[0]
    assert table.strip().replace(" %", "%") == estimates_table()
