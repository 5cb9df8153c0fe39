"""Folders as `save_to_disk` of Hugging Face datasets writes them, made by pyarrow."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow
import pytest


@pytest.fixture
def save_arrow(tmp_path) -> Callable[..., Path]:
    """Save rows, given as columns, or those of several splits; the names of classes by column, if any."""

    def save(data: Mapping, classes: Mapping | None = None, to: Path = tmp_path / "saved", files: int = 1) -> Path:
        to.mkdir(parents=True)
        if data and all(isinstance(value, Mapping) for value in data.values()):
            (to / "dataset_dict.json").write_text(json.dumps({"splits": [*data]}))
            for split, columns in data.items():
                save(columns, classes, to / split, files)
            return to
        table = pyarrow.table(dict(data))
        names = [f"data-{i:05}-of-{files:05}.arrow" for i in range(files)]
        for i, name in enumerate(names):
            rows = range(i * len(table) // files, (i + 1) * len(table) // files)
            with pyarrow.OSFile(str(to / name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table.slice(rows.start, len(rows)))
        state = {"_data_files": [{"filename": name} for name in names], "_format_type": None, "_split": "train"}
        (to / "state.json").write_text(json.dumps(state))
        features = {name: {"dtype": "string", "_type": "Value"} for name in data}
        features |= {name: {"names": words, "_type": "ClassLabel"} for name, words in (classes or {}).items()}
        (to / "dataset_info.json").write_text(json.dumps({"description": "", "features": features}))
        return to

    return save
