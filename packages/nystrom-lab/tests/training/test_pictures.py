"""Pictures have no padding: no mask reaches the model, and black pixels are tokens like all others."""

from dataclasses import replace

import pytest
import torch

from nystrom.models import EncoderForSequenceClassification
from nystrom_lab.data.lra.pathfinder.task import Pathfinder, prepare_pathfinder
from nystrom_lab.measure.rows import read_rows
from nystrom_lab.training.presets import find_preset
from nystrom_lab.training.tasks import prepare_if_missing


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures") / "pathfinder"
    return prepare_pathfinder(folder, train=16, val=6, test=6, workers=1)


@pytest.mark.long
def test_every_pixel_is_a_token(pictures, small_run, tmp_path, after_forward):
    masks, starts = [], []

    def note(model, inputs, _):
        if not starts:
            starts.append(model.nystromformer.embeddings.word_embeddings.weight.detach().clone())
        masks.append(("input_ids" in inputs, inputs.get("attention_mask")))

    after_forward(EncoderForSequenceClassification, note)
    changes = {"steps": 2, "warmup_steps": 0, "evaluate_every": 2, "batch_size": 4}
    run = small_run(tmp_path / "run", task="pathfinder", data=pictures, **changes)
    assert set(masks) == {(True, None)}
    model = EncoderForSequenceClassification.from_pretrained(run / "best")
    black = model.nystromformer.embeddings.word_embeddings.weight[0]
    assert (Pathfinder(pictures, "train")[0]["input_ids"] == 0).any()
    assert black.abs().sum() > 0
    assert not torch.equal(black, starts[0][0])
    assert model.config.id2label == {0: "apart", 1: "joined"}
    row = {row.quantity: row for row in read_rows(run / "rows.csv")}["test accuracy"]
    assert (row.study, row.n, row.repeats) == ("train pathfinder", 1024, 6)


@pytest.mark.long
def test_a_run_does_not_go_on_with_other_pictures_of_the_same_classes(pictures, small_run, tmp_path):
    other = prepare_pathfinder(tmp_path / "easy", contour=3, train=16, val=6, test=6, workers=1)
    assert (Pathfinder(other, "train").labels == Pathfinder(pictures, "train").labels).all()
    changes = {"task": "pathfinder", "steps": 2, "warmup_steps": 0, "evaluate_every": 1, "batch_size": 4}
    small_run(tmp_path / "run", data=pictures, **changes)
    with pytest.raises(ValueError, match="whose data were different"):
        small_run(tmp_path / "run", data=other, resume=True, **changes)


@pytest.mark.long
def test_a_preset_draws_snakes_of_its_own_length(tmp_path):
    sizes = replace(find_preset("pathfinder", "modern-small").data, train=2, val=2, test=2)
    prepare_if_missing("pathfinder", tmp_path / "pictures", sizes)
    drawn = prepare_pathfinder(tmp_path / "same", contour=3, train=2, val=2, test=2, workers=1)
    found, expected = Pathfinder(tmp_path / "pictures", "train"), Pathfinder(drawn, "train")
    assert [found[i]["input_ids"].tolist() for i in (0, 1)] == [expected[i]["input_ids"].tolist() for i in (0, 1)]
