"""Trainings that drop weights, as the authors' code does."""

import pytest

from nystrom_lab.training.run_settings import Settings, train_options


@pytest.mark.parametrize(("attention", "share"), [("softmax", 0.1), ("kernelized", 0.1), ("nystrom", 0.0)])
def test_a_training_drops_what_the_authors_drop_if_it_is_asked_to(attention, share):
    def settled(**changes):
        how = {"device": "cpu", "precision": "float32", "preset": "nystromformer"}
        return Settings.resolve(train_options("listops", attention=attention, **how, **changes))

    assert settled().encoder_config().attention_probs_dropout_prob == 0
    dropped = settled(drop_weights=True)
    assert dropped.encoder_config().attention_probs_dropout_prob == share
    assert dropped.changes() == {"drop_weights": True}
    with pytest.raises(ValueError, match=r"drop_weights is True, but design is 'transformers'.*leave drop_weights out"):
        settled(drop_weights=True, design="transformers")
