"""A run folder knows which of its checkpoints are complete."""

import dataclasses
import json
import shutil

import pytest
from safetensors import SafetensorError
from torch import distributed

from nystrom.sums import sha256
from nystrom.whole_files import NotWritten
from nystrom_lab.training.hardware import LostRanks
from nystrom_lab.training.run_folder import Point, RunFolder, written
from nystrom_lab.training.run_settings import Settings, train_options


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path)


@pytest.fixture
def settings():
    return Settings.resolve(train_options("listops", device="cpu", attention="nystrom", preset="demo"))


def save(run, step, *, complete=True, **state):
    partial = run.unfinished / f"checkpoint-{step}"
    partial.mkdir(parents=True)
    (partial / "weights").write_bytes(b"12345678")
    (partial / "optimizer.pt").write_bytes(b"1234")
    (partial / "trainer_state.json").write_text(json.dumps(state))
    if complete:
        run.complete(step)


def names(run):
    return sorted(path.name for path in run.path.iterdir())


def test_a_checkpoint_counts_once_it_is_complete(run):
    assert run.last_step() is None
    save(run, 9)
    save(run, 100, complete=False)
    assert run.last_step() == 9
    run.complete(100)
    assert run.last_step() == 100
    assert names(run) == ["checkpoint-100", "checkpoint-9"]


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
        run.start(settings, folder="data", fingerprint=data)
    save(mine, 9, global_step=9)
    save(other, 18, global_step=18)
    shutil.copytree(other.checkpoint(18), mine.checkpoint(18))
    assert mine.last_step() == 9
    assert mine.damage() == [(mine.checkpoint(18), "it is of a run with other data")]
    shutil.rmtree(mine.checkpoint(18))
    mine.checkpoint(9).rename(mine.checkpoint(27))
    assert mine.last_step() is None
    assert mine.damage() == [(mine.checkpoint(27), "it holds step 9")]


@pytest.mark.parametrize(
    "edit",
    [
        lambda run: run | {"versions": {"torch": "9.9"}},
        lambda run: run | {"data": run["data"] | {"folder": "moved"}},
        lambda run: run | {"settings": {name: run["settings"][name] for name in run["settings"] if name != "compile"}},
        lambda run: run,
    ],
)
def test_a_run_json_that_was_written_anew_loses_no_checkpoint(run, settings, edit):
    run.start(settings, folder="data", fingerprint="a-b")
    save(run, 9, global_step=9)
    file = run.path / "run.json"
    file.write_text(json.dumps(edit(json.loads(file.read_text())), indent=4) + "\n\n")
    assert run.last_step() == 9
    file.write_text(json.dumps({"settings": {"seed": 7}, "data": {"folder": "data", "fingerprint": "a-b"}}))
    assert run.damage() == [(run.checkpoint(9), "it is of a run with other seed")]


def test_a_checkpoint_of_a_version_that_summed_run_json_counts_however_that_is_indented(run, settings):
    run.start(settings, folder="data", fingerprint="a")
    save(run, 9, global_step=9)
    file, record = run.path / "run.json", run.checkpoint(9) / "complete.json"
    (run.checkpoint(9) / "run.json").unlink()
    listed = json.loads(record.read_text())
    del listed["run.json"]
    record.write_text(json.dumps(listed | {"../run.json": [file.stat().st_size, sha256(file)]}))
    assert run.last_step() == 9
    content = file.read_text()
    file.write_text(json.dumps(json.loads(content), indent=3))
    assert run.last_step() == 9
    file.write_text(content.replace('"seed": 0', '"seed": 1'))
    assert run.damage() == [(run.checkpoint(9), f"{file} is not the file that it was written with")]


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
def test_a_checkpoint_that_was_harmed_is_skipped_and_stays(run, harm):
    save(run, 3)
    save(run, 6)
    harm(run.checkpoint(6))
    harmed = {path.name: path.read_bytes() for path in run.checkpoint(6).iterdir()}
    assert run.last_step() == 3
    save(run, 6)
    run.prune(last=6, best=3)
    assert run.last_step() == 6
    assert names(run) == ["checkpoint-3", "checkpoint-6", "checkpoint-6-before"]
    assert {path.name: path.read_bytes() for path in (run.path / "checkpoint-6-before").iterdir()} == harmed


def test_of_the_best_checkpoint_only_the_weights_are_needed(run):
    for step, best in ((3, 3), (6, 3), (9, 9)):
        save(run, step, best_global_step=best)
    (run.checkpoint(9) / "weights").write_bytes(b"12345679")
    (run.checkpoint(3) / "optimizer.pt").write_bytes(b"1235")
    assert run.last_step() == 6
    (run.checkpoint(3) / "weights").unlink()
    assert run.last_step() is None
    assert [(path.name, what) for path, what in run.damage()] == [
        ("checkpoint-3", "optimizer.pt is damaged"),
        ("checkpoint-6", f"the best checkpoint before it is lost ({run.checkpoint(3)}: weights is missing)"),
        ("checkpoint-9", "weights is damaged"),
    ]


def test_the_last_two_and_the_best_stay(run):
    for step in (3, 6, 9, 12, 100):
        save(run, step)
    run.prune(last=100, best=6)
    assert names(run) == ["checkpoint-100", "checkpoint-12", "checkpoint-6"]


def test_what_a_run_has_not_written_is_never_removed(run, settings, tmp_path_factory):
    elsewhere = RunFolder(tmp_path_factory.mktemp("elsewhere"))
    for each, data in ((run, "a"), (elsewhere, "b")):
        each.start(settings, folder="data", fingerprint=data)
    for step in (3, 6, 9, 12, 15):
        save(run, step, global_step=step)
    (run.checkpoint(7)).mkdir()
    (run.checkpoint(7) / "notes.txt").write_text("mine")
    (run.checkpoint(6) / "notes.txt").write_text("mine")
    shutil.copytree(run.checkpoint(9), run.checkpoint(8))
    save(elsewhere, 5, global_step=5)
    shutil.copytree(elsewhere.checkpoint(5), run.checkpoint(5))
    run.checkpoint(4).symlink_to(elsewhere.checkpoint(5))
    shutil.copytree(run.checkpoint(3), elsewhere.path / "copy")
    run.checkpoint(3).rename(elsewhere.path / "moved")
    run.checkpoint(3).symlink_to(elsewhere.path / "moved")
    run.prune(last=12, best=None)
    run.remove_checkpoints()
    left = ["checkpoint-3", "checkpoint-4", "checkpoint-5", "checkpoint-6", "checkpoint-7", "checkpoint-8", "run.json"]
    assert names(run) == left
    assert [path.name for path in run.checkpoint(6).iterdir()] == ["notes.txt"]
    assert len(list(run.checkpoint(3).iterdir())) == len(list((elsewhere.path / "copy").iterdir()))


def test_the_last_but_one_can_be_continued_from_where_the_last_is_a_new_best_and_damaged(run):
    for step, best in ((5, 5), (10, 5), (15, 15)):
        save(run, step, best_global_step=best)
        run.prune(last=step, best=best)
    (run.checkpoint(15) / "weights").write_bytes(b"")
    assert run.last_step() == 10
    assert names(run) == ["checkpoint-10", "checkpoint-15", "checkpoint-5"]


def test_curves_are_replaced_as_a_whole(run):
    run.write_curves([Point(1, "train loss", 2.5, 0.5), Point(2, "train loss", 0.1, 1.0)])
    run.write_curves([Point(1, "train loss", 2.5, 0.5)])
    assert run.curves.read_text() == "step,quantity,value,seconds\n1,train loss,2.5,0.500\n"
    assert [path.name for path in run.path.iterdir()] == ["curves.csv"]


@pytest.mark.parametrize(
    ("error", "of_a_file"),
    [
        (OSError(28, "No space left on device"), True),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"), True),
        (RuntimeError("Parent directory run/checkpoint-3 does not exist."), True),
        (SafetensorError("Error while serializing: I/O error: File too large (os error 27)"), True),
        (SafetensorError("Error while serializing: InvalidTensorView"), False),
        (RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"), False),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 40000ms for recv"), False),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), False),
        (distributed.DistNetworkError("Connection reset by peer"), False),
        (LostRanks("rank 0 of 2 lost rank 1"), False),
        (TimeoutError("timed out"), False),
    ],
)
def test_only_an_error_of_a_file_is_told_as_one(tmp_path, error, of_a_file):
    with pytest.raises(NotWritten if of_a_file else type(error)) as found, written(tmp_path, "continue"):
        raise error
    assert isinstance(found.value, NotWritten) == of_a_file


def hold(run, settings, *, resume):
    with run.held(settings, resume=resume, main=True):
        pass


def edit_settings(run, edit):
    content = json.loads((run.path / "run.json").read_text())
    edit(content["settings"])
    (run.path / "run.json").write_text(json.dumps(content))


def start(run, settings):
    hold(run, settings, resume=False)
    run.start(settings, folder="data", fingerprint="00000000")


def test_a_run_that_began_before_there_was_a_setting_had_its_default(run, settings):
    start(run, settings)
    edit_settings(run, lambda found: [found.pop(name) for name in ("compile", "positions")])
    hold(run, settings, resume=True)
    other = dataclasses.replace(settings, compile=True, max_length=4096)
    says = r"compile is True but was False; positions is 4096 \(--max-length\) but was 512 \(the preset's\)"
    with pytest.raises(ValueError, match=says):
        hold(run, other, resume=True)


@pytest.mark.parametrize("tracked", [False, True])
def test_a_run_that_began_with_a_setting_of_its_curves_that_is_gone_is_resumed(run, settings, tracked):
    start(run, settings)
    edit_settings(run, lambda found: found.update(track_error=tracked))
    hold(run, settings, resume=True)
    assert run.read()["settings"]["track_error"] is tracked


def test_a_run_of_before_the_files_were_summed_goes_on(run, settings):
    start(run, settings)
    run.check_data("00000000-12345678")
    with pytest.raises(ValueError, match=r"data were different .* other texts: then start another run"):
        run.check_data("12345678-00000000")


def test_a_run_begins_in_a_free_folder_and_resumes_what_is_there(run, settings):
    with pytest.raises(ValueError, match="holds no run to resume"):
        hold(run, settings, resume=True)
    # A run that was killed as it began leaves this.
    (run.path / ".run.json.partial").write_text("{")
    hold(run, settings, resume=False)
    (run.path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is not empty and holds no run"):
        hold(run, settings, resume=False)


def test_links_in_a_folder_are_not_written_through(run, settings, tmp_path):
    victim = tmp_path / ".victim.partial"
    victim.write_text("mine")
    for name in (".run.json.partial", "run.partial", "curves.partial", "rows.partial"):
        (run.path / name).symlink_to(victim)
    hold(run, settings, resume=False)
    run.start(settings, folder="", fingerprint="")
    run.write_curves([])
    run.write_rows([])
    assert victim.read_text() == "mine"
    assert all(path.is_file() and not path.is_symlink() for path in (run.path / "run.json", run.curves, run.rows))


@pytest.mark.parametrize(
    "change", ["{", "[]", {"settings": None}, {"settings": []}, {"data": None}, {"data": {"folder": "data"}}]
)
def test_a_damaged_run_json_raises(run, settings, change):
    whole = {"settings": {}, "data": {"folder": "data", "fingerprint": "a"}}
    (run.path / "run.json").write_text(change if isinstance(change, str) else json.dumps(whole | change))
    with pytest.raises(ValueError, match=r"run.json (is not valid JSON|holds a list|does not describe a run)"):
        hold(run, settings, resume=True)


def test_a_folder_that_cannot_be_made_raises(tmp_path, settings):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written"):
        hold(RunFolder(tmp_path / "file" / "run"), settings, resume=False)
