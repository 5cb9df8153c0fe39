import dataclasses

import pytest
from PIL import Image

from nystrom_lab.measure.rows import Row, append_rows, read_rows
from nystrom_lab.report.table import Table
from nystrom_papers.report.summary import Summary, Verdict, read_summary, write_summary
from tools.gather_gallery import gather, restate, restore


@pytest.fixture
def runs(tmp_path):
    folder = tmp_path / "runs" / "complexity-small"
    folder.mkdir(parents=True)
    row = Row(study="complexity", quantity="products", method="nystrom", value=2.0, unit="", device="A CPU, 2 cores")
    append_rows(folder / "rows.csv", [dataclasses.replace(row, commit="abc1234", date="2026-01-02")])
    Image.new("RGB", (3, 2), "red").save(folder / "complexity.png")
    summary = Summary(
        name="complexity",
        shows="products",
        source="a paper",
        size="small",
        setting={"n": "4"},
        differs="",
        tables=[Table("products", ["method", "n=4"], [["nystrom", "2"]])],
        verdicts=[Verdict("It is linear.", True, "2 products.")],
        figures=["complexity.png"],
        rows=1,
        provenance="a CPU",
        command="nystrom reproduce --all",
        minutes=1.0,
    )
    write_summary(summary, folder)
    return tmp_path / "runs"


def test_rows_figures_and_the_page_are_taken_in(runs, tmp_path):
    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    [file] = gather(runs, results, docs)
    assert file == results / "gallery" / "complexity.csv"
    assert read_rows(file)[0].value == 2.0
    with Image.open(docs / "gallery" / "complexity.png") as picture:
        assert picture.convert("RGB").getpixel((2, 1)) == (255, 0, 0)
        assert picture.size == (3, 2)
    page = (docs / "gallery.md").read_text()
    for words in (
        "| [complexity](gallery/complexity.png) | products | in nothing | 1 | 0 | 0 |",
        "| the papers | 1 | 0 | 0 |",
    ):
        assert words in page
    summary = read_summary(docs / "gallery", "complexity.json")
    assert summary is not None
    assert summary.provenance.startswith("float32, A CPU, 2 cores, torch ")
    assert summary.provenance.endswith(", commit abc1234, 2026-01-02")
    assert "- `blog`: not among these rows; needs" in page


@pytest.mark.parametrize("commit", ["abc1234+dirty", "", "def5678"])
def test_rows_that_were_not_measured_at_one_clean_commit_are_not_taken(commit, runs, tmp_path):
    rows = read_rows(runs / "complexity-small" / "rows.csv")
    append_rows(runs / "complexity-small" / "rows.csv", [dataclasses.replace(rows[0], commit=commit)])
    with pytest.raises(ValueError, match="expected those of one"):
        gather(runs, tmp_path, tmp_path / "docs")
    assert not (tmp_path / "docs").exists()


def test_other_studies_stay_and_older_rows_and_pictures_of_the_same_go(runs, tmp_path):
    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    gather(runs, results, docs)
    later = tmp_path / "later"
    source, summary = runs / "complexity-small", read_summary(runs / "complexity-small")
    assert summary is not None
    [row] = read_rows(source / "rows.csv")
    for name, day, figures in (("low-rank", "03", []), ("complexity", "04", [])):
        folder = later / name / f"{name}-small"
        folder.mkdir(parents=True)
        write_summary(dataclasses.replace(summary, name=name, figures=figures), folder)
        changed = dataclasses.replace(row, study=name, date=f"2026-01-{day}", commit=f"abc{day}")
        append_rows(folder / "rows.csv", [changed])
        gather(later / name, results, docs)
    dates = {file.name: [each.date for each in read_rows(file)] for file in (results / "gallery").iterdir()}
    assert dates == {"low-rank.csv": ["2026-01-03"], "complexity.csv": ["2026-01-04"]}
    assert not (docs / "gallery" / "complexity.png").exists()
    page = (docs / "gallery.md").read_text()
    assert "\n| low-rank | products |" in page
    assert "\n| complexity | products |" in page


def test_gathered_rows_become_folders_again(runs, tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    gather(runs, results, tmp_path / "docs")
    [folder] = restore(tmp_path / "again", results)
    assert folder == tmp_path / "again" / "complexity-small"
    assert read_rows(folder / "rows.csv") == read_rows(runs / "complexity-small" / "rows.csv")
    assert restore(tmp_path / "again", results) == []


def test_verdicts_and_figures_are_written_again_from_rows(tmp_path):
    results, docs, name = tmp_path / "results", tmp_path / "docs", "nystromformer-table-3"
    for folder in (results, docs / "gallery"):
        folder.mkdir(parents=True)
    made = [
        Row(study=name, quantity="listops test accuracy", method=method, value=value, unit="", n=100, repeats=2000,
                facts={"layers": 2, "preset": "demo", "part": "a"}, seed=0, device="a CPU", command="nystrom train")
        for method, value in (("softmax", 0.4), ("nystrom-32", 0.3))
    ]  # fmt: skip
    append_rows(results / "gallery" / f"{name}.csv", made)
    older = Summary(
        name=name, shows="accuracies", source="a paper", size="small", setting={}, differs="", tables=[],
        verdicts=[Verdict("An older rule.", True, "")], figures=[f"{name}.png"], rows=2, provenance="a CPU",
        command="nystrom lra run", minutes=1.0,
    )  # fmt: skip
    write_summary(older, docs / "gallery", f"{name}.json")
    restate([name], results, docs, draw=True)
    kept = read_summary(docs / "gallery", f"{name}.json")
    assert [verdict.agrees for verdict in kept.verdicts] == [False, None]
    assert (docs / "gallery" / f"{name}.png").is_file()
    assert "listops -10.0" in kept.verdicts[0].numbers
    assert f"\n| [{name}]" in (docs / "gallery.md").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=f"has nothing of complexity; expected one of {name}"):
        restate(["complexity"], results, docs, draw=False)
    write_summary(dataclasses.replace(older, figures=["other.png"]), docs / "gallery", f"{name}.json")
    (docs / "gallery" / "other.png").touch()
    restate([name], results, docs, draw=True)
    assert read_summary(docs / "gallery", f"{name}.json").figures == [f"{name}.png"]
    assert not (docs / "gallery" / "other.png").exists()


def test_a_folder_without_studies_raises(tmp_path):
    with pytest.raises(ValueError, match="holds no study"):
        gather(tmp_path, tmp_path, tmp_path / "docs")


def test_trainings_may_be_of_several_commits(runs, tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    source = runs / "complexity-small"
    folder = runs / "nystromformer-figure-5-small"
    folder.mkdir()
    summary = read_summary(source)
    assert summary is not None
    write_summary(dataclasses.replace(summary, name="nystromformer-figure-5", figures=[]), folder)
    row = dataclasses.replace(read_rows(source / "rows.csv")[0], study="nystromformer-figure-5")
    append_rows(folder / "rows.csv", [row, dataclasses.replace(row, commit="def5678", date="2026-01-03")])
    gather(runs, results, tmp_path / "docs")
    assert sorted(file.stem for file in (results / "gallery").iterdir()) == ["complexity", "nystromformer-figure-5"]
