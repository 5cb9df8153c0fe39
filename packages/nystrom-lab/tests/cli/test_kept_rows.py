"""No command loses a row: what a file of rows holds of other settings or other runs stays, or the command refuses.

A row of the same settings may be measured anew. A file of others that holds no rows is refused: see test_outputs.
"""

from dataclasses import replace

import pytest

from nystrom_lab.cli.main import main
from nystrom_lab.measure.rows import Row, append_rows, read_rows
from nystrom_lab.training.grid.table import write_table

FOREIGN = Row(study="other", quantity="time", method="softmax", value=1.25, unit="ms", device="elsewhere")
SMALL = "--methods softmax --repeats 1 --lengths 8"
long = pytest.mark.long
# For each command that writes rows: its file, its words, and words of another setting.
COMMANDS = [
    ("bench efficiency", "efficiency.csv", f"--passes forward {SMALL}", f"--passes forward --seed 1 {SMALL}"),
    ("bench model", "model.csv", f"--layers 1 --width 8 --heads 2 {SMALL}", f"--layers 1 --width 8 --heads 1 {SMALL}"),
    ("train", "rows.csv", "listops --data {data} --preset demo --steps 2 --batch-size 4 --attention softmax --resume",
     "listops --data {data} --preset demo --steps 2 --batch-size 2 --attention softmax --resume"),
    ("finetune", "rows.csv", "--model {model} --data {texts} --steps 2 --batch-size 4 --resume",
     "--model {model} --data {texts} --steps 3 --batch-size 4 --resume"),
    ("inspect", "rows.csv", "{model} --texts {text} --num-texts 1 --methods nystrom-4 --length 16",
     "{model} --texts {text} --num-texts 1 --methods nystrom-8 --length 16"),
    pytest.param("reproduce complexity", "complexity-small/rows.csv", "", "--threads 2", marks=long),
]  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory, data, tiny_bert, prose, mlm):
    """Inputs of commands, by their names in the words."""
    work = tmp_path_factory.mktemp("work")
    (work / "texts.csv").write_text("text,label\n" + "".join(f"the river {i},{'ab'[i % 2]}\n" for i in range(40)))
    return {"data": data, "model": tiny_bert, "text": prose, "texts": work / "texts.csv", "mlm": mlm}


def measurements(file):
    """The measurements of a file's rows, without their results."""
    blank = {"value": 0.0, "low": None, "high": None, "torch": "", "commit": "", "date": "", "note": "", "facts": {}}
    return {(replace(row, **blank), tuple(sorted(row.facts.items()))) for row in read_rows(file)}


@pytest.mark.long
@pytest.mark.parametrize(("command", "file", "words", "other"), COMMANDS)
def test_a_command_keeps_the_rows_that_it_does_not_measure_anew(command, file, words, other, places, tmp_path, capsys):
    to = tmp_path / "to"

    def run(words):
        full = [*command.split(), *words.format(**places).split(), "--to", str(to)]
        return main([word for word in full if word != "--resume" or (to / "run.json").exists()])

    def loses_nothing(words):
        before, measured = (to / file).read_bytes(), measurements(to / file)
        code, said = run(words), capsys.readouterr().err
        assert code in (0, 2), said
        assert code == 0 or ((to / file).read_bytes() == before and str(to) in said.splitlines()[-1])
        assert measurements(to / file) >= measured

    assert run(words) == 0
    first = (to / file).read_bytes()
    loses_nothing(words)
    loses_nothing(other)
    append_rows(to / file, [FOREIGN])
    loses_nothing(words)
    (to / file).write_bytes(first[:-3])
    assert run(other) == 2
    assert str(to) in capsys.readouterr().err.splitlines()[-1]
    assert (to / file).read_bytes() == first[:-3]


def finished(to, name, seed, value):
    """A run of a grid, as far as the table reads it."""
    row = Row(study="train listops", quantity="test accuracy", method="softmax", value=value, unit="",
                  device="cpu", seed=seed, command=f"nystrom train listops --seed {seed}")  # fmt: skip
    append_rows(to / name / "rows.csv", [row, replace(row, quantity="steps", value=700.0)])


def test_the_table_of_a_grid_keeps_the_rows_of_runs_that_were_moved_away(tmp_path):
    to, table = tmp_path / "grid", tmp_path / "grid" / "lra.csv"
    finished(to, "seed0", 0, 0.25)
    write_table(to)
    archived = read_rows(table)
    (to / "seed0").rename(tmp_path / "archived")
    write_table(to)
    assert read_rows(table) == archived
    finished(to, "seed1", 1, 0.5)
    write_table(to)
    assert [(row.seed, row.value) for row in read_rows(table)] == [(0, 0.25), (0, 700), (1, 0.5), (1, 700)]
    # The same training again, in the same place.
    finished(to, "again", 0, 0.75)
    write_table(to)
    assert sorted((row.seed, row.value) for row in read_rows(table)) == [(0, 0.75), (0, 700), (1, 0.5), (1, 700)]
    append_rows(table, [FOREIGN])
    write_table(to)
    assert FOREIGN in read_rows(table)
    table.write_bytes(damaged := table.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"lra\.csv, line 6 has no end"):
        write_table(to)
    assert table.read_bytes() == damaged
