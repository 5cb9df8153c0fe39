"""A damaged database of a search ends in one line that says what becomes of the trials."""

import pytest

from nystrom_lab.training.finetune.search.database import intact

pytest.importorskip("optuna")


def make(file):
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = optuna.storages.RDBStorage(f"sqlite:///{file}")
    study = optuna.create_study(study_name="finetune", storage=storage, load_if_exists=True)
    study.enqueue_trial({"seed": 1})
    storage.engine.dispose()


@pytest.fixture
def file(tmp_path):
    make(tmp_path / "search.sqlite")
    return tmp_path / "search.sqlite"


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"no database" * 1000,
        lambda content: content[: len(content) // 2],
        lambda content: content[:100] + bytes(4000) + content[4100:],
        lambda content: content[:-4000] + bytes([255]) * 4000,
        # Optuna alone would see nothing of it before the first trial ends.
        lambda content: content[: len(content) // 2] + bytes([7]) * 8192 + content[len(content) // 2 + 8192 :],
    ],
    ids=["text", "cut", "start", "end", "middle"],
)
def test_damage_is_told_before_the_database_is_used(file, damage):
    file.write_bytes(damage(file.read_bytes()))
    told = pytest.raises(ValueError, match=r"search\.sqlite cannot be read or written \(.+\): make room")
    with told as error, intact(file):
        pytest.fail("it is used")
    assert "delete it and start the same command again with --resume" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_table_that_is_lost_is_told_where_it_is_wanted(file):
    import optuna

    storage = optuna.storages.RDBStorage(f"sqlite:///{file}")
    with storage.engine.begin() as database:
        database.exec_driver_sql("DROP TABLE trials")
    with pytest.raises(ValueError, match=r"\(no such table: trials\): make room"), intact(file):
        storage.get_all_trials(1)
    storage.engine.dispose()


def test_a_sound_database_and_other_errors_pass(file):
    with intact(file):
        make(file)
    with intact(file.with_name("new.sqlite")):
        make(file.with_name("new.sqlite"))
    with pytest.raises(KeyError), intact(file):
        raise KeyError
