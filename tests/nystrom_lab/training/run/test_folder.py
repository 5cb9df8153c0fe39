"""A run folder knows which of its checkpoints are complete."""

import dataclasses
import json
import shutil

import pytest

from nystrom_lab.training.options import TrainOptions
from nystrom_lab.training.run.folder import Point, RunFolder
from nystrom_lab.training.run_settings import settle


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path)


@pytest.fixture
def settings():
    return settle(TrainOptions("listops", device="cpu", attention="nystrom", preset="demo"))


def save(run, step, complete=True):
    run.checkpoint(step).mkdir()
    (run.checkpoint(step) / "weights").write_bytes(b"12345678")
    if complete:
        run.mark_complete(step)


def test_a_checkpoint_counts_once_it_is_complete(run):
    assert run.last_step() is None
    save(run, 9)
    save(run, 100, complete=False)
    assert run.last_step() == 9
    run.mark_complete(100)
    assert run.last_step() == 100


def test_a_checkpoint_of_a_version_without_checksums_counts_by_its_sizes(run):
    save(run, 3)
    (run.checkpoint(3) / "complete.json").write_text('{"weights": 8}')
    assert run.last_step() == 3
    (run.checkpoint(3) / "complete.json").write_text('{"weights": 9}')
    assert run.last_step() is None


def test_a_checkpoint_of_another_run_or_step_is_none_of_this_one(tmp_path, settings):
    mine, other = RunFolder(tmp_path / "mine"), RunFolder(tmp_path / "other")
    for run, data in ((mine, "a"), (other, "b")):
        run.path.mkdir()
        run.start(settings, {"folder": "data", "fingerprint": data}, {})
    for run, step in ((mine, 9), (other, 18)):
        run.checkpoint(step).mkdir()
        (run.checkpoint(step) / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        run.mark_complete(step)
    shutil.copytree(other.checkpoint(18), mine.checkpoint(18))
    assert mine.last_step() == 9
    assert mine.damage() == [(mine.checkpoint(18), "../run.json is not the file that this folder was written with")]
    shutil.rmtree(mine.checkpoint(18))
    mine.checkpoint(9).rename(mine.checkpoint(27))
    assert mine.last_step() is None
    assert mine.damage() == [(mine.checkpoint(27), "it holds step 9")]


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "weights").write_bytes(b"1234"),
        lambda folder: (folder / "weights").write_bytes(b"12345679"),
        lambda folder: (folder / "weights").unlink(),
        lambda folder: (folder / "complete.json").unlink(),
        lambda folder: (folder / "complete.json").write_text("[1]"),
        lambda folder: (folder / "complete.json").write_text("{"),
        lambda folder: (folder / "complete.json").write_text("{}"),
    ],
)
def test_a_checkpoint_that_was_harmed_is_passed_over_and_removed(run, harm):
    save(run, 3)
    save(run, 6)
    harm(run.checkpoint(6))
    assert run.last_step() == 3
    run.remove_after(3)
    assert [path.name for path in run.path.iterdir()] == ["checkpoint-3"]


def test_a_checkpoint_whose_best_is_lost_is_skipped(run):
    for step, best in ((3, 3), (6, 3), (9, 9)):
        save(run, step, complete=False)
        (run.checkpoint(step) / "trainer_state.json").write_text(json.dumps({"best_global_step": best}))
        run.mark_complete(step)
    (run.checkpoint(9) / "weights").write_bytes(b"12345679")
    assert run.last_step() == 6
    (run.checkpoint(3) / "weights").unlink()
    assert run.last_step() is None
    assert [(path.name, what) for path, what in run.damage()] == [
        ("checkpoint-3", "weights is missing"),
        ("checkpoint-6", f"the best checkpoint before it is lost ({run.checkpoint(3)}: weights is missing)"),
        ("checkpoint-9", "weights is damaged"),
    ]


def test_nothing_is_left_of_checkpoints_when_none_is_whole(run):
    save(run, 3, complete=False)
    run.remove_after(None)
    assert list(run.path.iterdir()) == []


def test_the_last_two_and_the_best_stay(run):
    for step in (3, 6, 9, 12, 100):
        save(run, step)
    run.prune(best=6)
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoint-100", "checkpoint-12", "checkpoint-6"]


def test_the_last_but_one_can_be_continued_from_where_the_last_is_a_new_best_and_damaged(run):
    for step, best in ((5, 5), (10, 5), (15, 15)):
        save(run, step, complete=False)
        (run.checkpoint(step) / "trainer_state.json").write_text(json.dumps({"best_global_step": best}))
        run.mark_complete(step)
        run.prune(best=best)
    (run.checkpoint(15) / "weights").write_bytes(b"")
    assert run.last_step() == 10
    run.remove_after(10)
    assert sorted(run._steps()) == [5, 10]


def test_curves_are_replaced_as_a_whole(run):
    run.write_curves([Point(1, "train loss", 2.5, 0.5), Point(2, "train loss", 0.1, 1.0)])
    run.write_curves([Point(1, "train loss", 2.5, 0.5)])
    assert run.curves.read_text() == "step,quantity,value,seconds\n1,train loss,2.5,0.500\n"
    assert [path.name for path in run.path.iterdir()] == ["curves.csv"]


def hold(run, settings, *, resume):
    with run.held(settings, resume=resume, main=True):
        pass


def start(run, settings):
    hold(run, settings, resume=False)
    run.start(settings, {"folder": "data", "fingerprint": "00000000"}, {})


def test_a_folder_that_holds_a_run_is_only_resumed(run, settings):
    start(run, settings)
    hold(run, settings, resume=True)
    with pytest.raises(ValueError, match="holds a run: continue it with --resume, or choose another folder with --to"):
        hold(run, settings, resume=False)


def test_a_run_is_resumed_with_its_own_settings_only(run, settings):
    start(run, settings)
    other = dataclasses.replace(settings, seed=1, learning_rate=0.5)
    with pytest.raises(ValueError, match=r"learning_rate is 0\.5 but was 0\.\d+; seed is 1 but was 0"):
        hold(run, other, resume=True)
    with pytest.raises(ValueError, match="attention is 'softmax' but was 'nystrom'"):
        hold(run, dataclasses.replace(settings, attention="softmax"), resume=True)


def test_a_run_that_began_before_there_was_a_setting_had_its_default(run, settings):
    start(run, settings)
    content = json.loads((run.path / "run.json").read_text())
    del content["settings"]["compile"], content["settings"]["positions"]
    (run.path / "run.json").write_text(json.dumps(content))
    hold(run, settings, resume=True)
    other = dataclasses.replace(settings, compile=True, positions=4096)
    says = r"compile is True but was False; positions is 4096 \(--max-length\) but was 512 \(the preset's\)"
    with pytest.raises(ValueError, match=says):
        hold(run, other, resume=True)


def test_a_run_is_resumed_with_its_own_data_only(run, settings):
    start(run, settings)
    run.check_data("00000000")
    with pytest.raises(ValueError, match=r"holds a run on data, whose data were different.*now 12345678.*--data"):
        run.check_data("12345678")


def test_a_run_of_before_the_files_were_summed_goes_on(run, settings):
    start(run, settings)
    run.check_data("00000000-12345678")
    with pytest.raises(ValueError, match="data were different"):
        run.check_data("12345678-00000000")


def test_there_must_be_a_run_to_resume(run, settings):
    with pytest.raises(ValueError, match="holds no run to resume"):
        hold(run, settings, resume=True)


def test_a_folder_with_something_else_is_left_alone(run, settings):
    (run.path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is not empty and holds no run"):
        hold(run, settings, resume=False)


def test_a_folder_in_which_a_killed_run_had_only_begun_is_free(run, settings):
    (run.path / ".run.json.partial").write_text("{")
    hold(run, settings, resume=False)


def test_links_in_a_folder_are_not_written_through(run, settings, tmp_path):
    victim = tmp_path / ".victim.partial"
    victim.write_text("mine")
    for name in (".run.json.partial", "run.partial", "curves.partial", "rows.partial"):
        (run.path / name).symlink_to(victim)
    hold(run, settings, resume=False)
    run.start(settings, {}, {})
    run.write_curves([])
    run.write_rows([])
    assert victim.read_text() == "mine"
    assert all(path.is_file() and not path.is_symlink() for path in (run.path / "run.json", run.curves, run.rows))


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"settings": {}})])
def test_a_damaged_run_json_raises(run, settings, content):
    (run.path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=r"run.json (is not JSON|does not describe a run)"):
        hold(run, settings, resume=True)


def test_a_folder_that_cannot_be_made_raises(tmp_path, settings):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written"):
        hold(RunFolder(tmp_path / "file" / "run"), settings, resume=False)
