"""A converted model learns its attention back: it is nearer to the exact one, or stays as it came."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    BertTokenizer,
    DistilBertConfig,
    DistilBertModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import nystrom.integrations  # noqa: F401 (registers the methods that config.json names)
from nystrom.attention.plan import AttentionPlan, LayerChoice
from nystrom.command_options import ConvertOptions
from nystrom.integrations.convert import convert
from nystrom.models import EncoderModel
from nystrom_lab.cli.main import main
from nystrom_lab.config import HealOptions
from nystrom_lab.measure.rows import read_rows
from nystrom_lab.training import healing
from nystrom_lab.training.finite import NotFinite
from nystrom_lab.training.heal import heal
from nystrom_lab.training.heal_trainer import HealTrainer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "the", "a", "plot", "very", "and", "it"]
SIZES = {"vocab_size": len(WORDS), "max_position_embeddings": 48, "initializer_range": 0.3}
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}


def saved(model, folder):
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    torch.manual_seed(0)
    return saved(BertModel(BertConfig(**SIZES, **BERT)), tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """Texts of 25 to 44 words."""
    draw = torch.Generator().manual_seed(0)
    lines = [
        " ".join(WORDS[word] for word in torch.randint(5, len(WORDS), (25 + i % 20,), generator=draw))
        for i in range(100)
    ]
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n\n".join(lines))
    return path


@pytest.fixture(scope="session")
def healed(bert, texts):
    """A healing of six steps, a checkpoint every two."""

    def run(to, source=bert, **changes):
        settings = {"texts": [texts], "num_landmarks": 4, "steps": 6, "batch_size": 4, "evaluate_every": 2}
        return heal(
            HealOptions(source, to, **(settings | {"learning_rate": 1e-3, "whole": 0.5, "device": "cpu"} | changes))
        )

    return run


@pytest.fixture(scope="session")
def unbroken(healed, tmp_path_factory):
    """Such a run; tests look at it and change nothing."""
    return healed(tmp_path_factory.mktemp("unbroken") / "made")


def errors(to):
    """The error and the distance on held-out texts before, and after."""
    found = {row.quantity: row.value for row in read_rows(to.with_name(f"{to.name}-run") / "rows.csv")}
    return [found[f"held-out error {when}"] for when in ("before", "after")]


def steps_of(run):
    return [row.value for row in read_rows(run / "rows.csv") if row.quantity == "steps"]


def weights(to):
    return load_file(to / "model.safetensors")


def test_the_error_on_held_out_texts_falls_by_half(healed, tmp_path):
    """A kernel in place of softmax, in one layer of moderate weights, which it can learn."""
    torch.manual_seed(0)
    config = BertConfig(**SIZES | {"initializer_range": 0.2}, **BERT | {"num_hidden_layers": 1})
    source = saved(BertModel(config), tmp_path / "source")
    to = healed(tmp_path / "made", source, attention="kernelized", num_landmarks="auto", learning_rate=1e-2,
                steps=80, batch_size=8, evaluate_every=40)  # fmt: skip
    before, after = errors(to)
    assert after < before / 2


def test_the_folder_is_a_converted_one_and_its_card_says_what_it_learned(unbroken, bert, tmp_path):
    convert(ConvertOptions(bert, tmp_path / "plain", num_landmarks=4))
    assert {path.name for path in unbroken.iterdir()} == {*(path.name for path in (tmp_path / "plain").iterdir())}
    model, plain = (AutoModel.from_pretrained(folder) for folder in (unbroken, tmp_path / "plain"))
    assert type(model) is EncoderModel
    before, after = errors(unbroken)
    assert after < before
    card = (unbroken / "README.md").read_text()
    assert "(nystrom-4) learned from the exact model, bert, on up to 24 texts of 12 to 48 tokens (texts.txt)" in card
    assert f"{before:.3g} before, {after:.3g} after" in card
    # The attention blocks learned, and nothing else did.
    changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, plain.state_dict()[name])}
    assert changed
    assert all(".attention." in name for name in changed)


def test_the_reported_error_is_that_of_the_folder(unbroken, bert, texts, tmp_path):
    """transformers' own model has the same error on the held-out texts alone."""
    tokenizer = BertTokenizer.from_pretrained(bert)
    kept = texts.read_text().split("\n\n")[:32]
    order = np.random.default_rng(0).permutation(32)[:8]
    exact, made = BertModel.from_pretrained(bert).eval(), AutoModel.from_pretrained(unbroken).eval()
    found = []
    for i in order:
        inputs = tokenizer(kept[i], truncation=True, max_length=48, return_tensors="pt")
        with torch.no_grad():
            a, b = (model(**inputs).last_hidden_state for model in (exact, made))
        found.append(float((a - b).norm() / a.norm()))
    # float32
    assert sum(found) / 8 == pytest.approx(errors(unbroken)[1], rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("learn", ["queries-keys", "all", "adapters"])
def test_what_learns_is_an_option(learn, healed, bert, tmp_path):
    if learn == "adapters":
        pytest.importorskip("peft")
    precision = "bfloat16" if learn == "all" else "float32"
    to = healed(tmp_path / "made", learn=learn, steps=8, precision=precision)
    convert(ConvertOptions(bert, tmp_path / "plain", num_landmarks=4))
    before, after = errors(to)
    assert after < before
    plain = weights(tmp_path / "plain")
    changed = {name for name, weight in weights(to).items() if not torch.equal(weight, plain[name])}
    parts = {"queries-keys": ("query", "key", "conv"), "all": ("encoder.layer",), "adapters": ("encoder.layer",)}
    assert changed
    assert all(any(part in name for part in parts[learn]) for name in changed)


def test_a_frozen_model_learns_as_any_other(bert, tmp_path):
    """The weights of a frozen model ask for no gradients; `learn` alone says which do."""
    convert(ConvertOptions(bert, tmp_path / "plain", num_landmarks=4))
    model = AutoModel.from_pretrained(tmp_path / "plain").requires_grad_(False)
    made = healing.Healing(model, tmp_path / "plain", "attention", mask=None)
    ids = torch.randint(5, len(WORDS), (2, 40), generator=torch.Generator().manual_seed(0))
    made(ids, torch.ones_like(ids), whole=False)["loss"].backward()
    moved = {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert moved
    assert moved <= {name for name, _ in model.named_parameters() if ".attention." in name}


@pytest.mark.parametrize("whole", [False, True])
def test_a_masked_language_model_learns_on_masked_texts(whole, tmp_path):
    source = saved(BertForMaskedLM(BertConfig(**SIZES, **BERT)), tmp_path / "source")
    convert(ConvertOptions(source, tmp_path / "plain", num_landmarks=4))
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "plain")
    mask, seen = WORDS.index("[MASK]"), []
    made = healing.Healing(model, tmp_path / "plain", "attention", mask=mask)
    made.teacher.base_model.register_forward_pre_hook(lambda _, args, given: seen.append(given), with_kwargs=True)
    ids = torch.full((2, 40), 5)
    made(ids, torch.ones_like(ids), whole=whole)
    (given,) = seen
    assert (given["input_ids"] == mask).sum(1).tolist() == [6, 6]


def test_adapters_without_peft_are_refused_by_name(healed, tmp_path, monkeypatch):
    monkeypatch.setattr(healing, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"adapters.*pip install peft"):
        healed(tmp_path / "made", learn="adapters")
    assert not (tmp_path / "made").exists()


@pytest.mark.long
def test_a_model_that_became_worse_is_not_kept(healed, bert, tmp_path, capsys):
    to = healed(tmp_path / "made", learning_rate=0.5, steps=4, learn="all")
    assert "not nearer to the exact one, so the conversion is kept as it came" in capsys.readouterr().out
    assert "not kept" in (to / "README.md").read_text()
    convert(ConvertOptions(bert, tmp_path / "plain", num_landmarks=4))
    assert_close(weights(to), weights(tmp_path / "plain"), rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("step", [2, 3, 6])
def test_a_run_that_is_interrupted_goes_on_to_the_same_bits(step, healed, unbroken, tmp_path, monkeypatch):
    inner = HealTrainer.training_step

    def training_step(self, *given):
        if self.state.global_step + 1 == step:
            raise KeyboardInterrupt
        return inner(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(HealTrainer, "training_step", training_step)
        with pytest.raises(KeyboardInterrupt):
            healed(tmp_path / "made")
    assert not (tmp_path / "made").exists()
    to = healed(tmp_path / "made", resume=True)
    assert_close(weights(to), weights(unbroken), rtol=0, atol=0)
    assert errors(to) == errors(unbroken)


@pytest.mark.long
@pytest.mark.parametrize("whole", [0.95, 0])
def test_a_run_stops_when_the_error_stops_falling_and_goes_on_to_the_same(whole, healed, tmp_path, monkeypatch):
    changes = {"steps": 40, "evaluate_every": 1, "learning_rate": 0.1, "whole": whole}

    inner = HealTrainer.finish

    def finish(self, command):
        inner(self, command)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HealTrainer, "finish", finish)
        with pytest.raises(KeyboardInterrupt):
            healed(tmp_path / "made", **changes)
    run = tmp_path / "made-run"
    last = max(int(path.name.rpartition("-")[2]) for path in run.glob("checkpoint-*"))
    assert last < 40
    assert steps_of(run) == [last]
    # The run ends after the last checkpoint, before the results.
    (run / "rows.csv").unlink()
    healed(tmp_path / "made", resume=True, **changes)
    assert steps_of(run) == [last]
    assert last == max(int(path.name.rpartition("-")[2]) for path in run.glob("checkpoint-*"))


@pytest.mark.long
def test_a_finished_run_that_is_resumed_stays_as_it_is(healed, tmp_path, capsys):
    to = healed(tmp_path / "made", steps=2)
    shutil.rmtree(to)
    healed(to, steps=2, resume=True)
    assert "is finished" in capsys.readouterr().out
    assert (to / "model.safetensors").is_file()
    with pytest.raises(ValueError, match=r"learning_rate is 0\.5 but was 0\.001"):
        healed(to, steps=2, resume=True, learning_rate=0.5)


def test_a_healed_model_is_written_wherever_it_is_free_and_nowhere_else(healed, tmp_path, monkeypatch, capsys):
    to, finish = tmp_path / "made", HealTrainer.finish
    to.mkdir()

    def taken():
        (to / "thesis.tex").touch()

    def file():
        to.touch()

    def link():
        to.symlink_to(tmp_path)

    def broken_link():
        to.symlink_to(tmp_path / "nowhere")

    with monkeypatch.context() as patch:
        patch.setattr(HealTrainer, "finish", lambda *given: (finish(*given), taken()))
        with pytest.raises(ValueError, match=r"made is not empty.* The healed model is .*made-run/best; once"):
            healed(to, steps=2)
    assert [path.name for path in to.iterdir()] == ["thesis.tex"]
    shutil.rmtree(to)
    for state in (file, link, broken_link):
        state()
        with pytest.raises(ValueError, match=r"made is a (file|symbolic link).* The healed model is .*made-run/best;"):
            healed(to, steps=2, resume=True)
        to.unlink()
    assert f"healed {to}" not in capsys.readouterr().out
    to.mkdir()
    healed(to, steps=2, resume=True)
    best = tmp_path / "made-run" / "best"
    assert {path.name for path in to.iterdir()} == {path.name for path in best.iterdir()} - {"complete.json"}
    # It is there: nothing is written, whatever was added.
    (to / "README.md").write_text("mine")
    healed(to, steps=2, resume=True)
    assert capsys.readouterr().out.count(f"healed {to}") == 1
    assert (to / "README.md").read_text() == "mine"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "complete.json"])
def test_a_damaged_model_of_a_finished_run_is_not_copied_out(name, healed, unbroken, tmp_path):
    shutil.copytree(unbroken.with_name("made-run"), tmp_path / "made-run")
    file = tmp_path / "made-run" / "best" / name
    if name == "model.safetensors":
        file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    else:
        file.unlink()
    with pytest.raises(ValueError, match=rf"made-run is finished, but model .*best: {name} is (damaged|missing)"):
        healed(tmp_path / "made", resume=True)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("part", ["configuration", "tokenizer", "pooling"])
def test_a_run_does_not_go_on_with_another_model(part, healed, bert, tmp_path, monkeypatch):
    source = shutil.copytree(bert, tmp_path / "source")
    (source / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_Pooling"}]))
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": false}')

    def stop(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HealTrainer, "training_step", stop)
        with pytest.raises(KeyboardInterrupt):
            healed(tmp_path / "made", source)
    file, old, new = {
        "configuration": ("config.json", '"layer_norm_eps": 1e-12', '"layer_norm_eps": 1e-3'),
        # The order of these words in the file, and no token.
        "tokenizer": ("vocab.txt", "good\nbad", "bad\ngood"),
        "pooling": ("1_Pooling/config.json", "false", "true"),
    }[part]
    content = (source / file).read_text()
    assert old in content
    (source / file).write_text(content.replace(old, new))
    with pytest.raises(ValueError, match=f"other settings: the {part} of its model changed"):
        healed(tmp_path / "made", source, resume=True)


def test_states_that_are_not_finite_are_named(healed, bert, texts, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(bert, broken)
    tensors = weights(broken)
    for part in ("query", "key"):
        # Finite numbers, whose products are not.
        tensors[f"encoder.layer.0.attention.self.{part}.weight"] *= 1e30
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NotFinite, match="the states of the exact model itself are not finite in a text of"):
        healed(tmp_path / "made", broken)
    assert not (tmp_path / "made").exists()


def test_texts_that_are_not_there_are_refused_before_anything_is_converted(healed, tmp_path, capsys):
    with pytest.raises(ValueError, match="nothere does not exist"):
        healed(tmp_path / "made", texts=[tmp_path / "nothere"])
    assert not capsys.readouterr().out


def test_a_run_that_is_there_is_told_before_anything_is_converted(healed, tmp_path, capsys):
    (tmp_path / "made-run").mkdir()
    (tmp_path / "made-run" / "run.json").touch()
    with pytest.raises(ValueError, match="made-run holds a run: continue it with --resume"):
        healed(tmp_path / "made")
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"shortest": 47}, "0 of 100 texts have at least 47 tokens, the longest 46; expected 12,.*a blank line"),
        ({"length": 49}, "length is 49 but the new model has 48 positions"),
        ({"num_landmarks": 48}, r"is exact on texts of 4. tokens, so nothing is to be healed.*--exact-up-to 0"),
        ({"texts": ()}, "texts names nothing"),
        ({"learn": "values"}, "learn is 'values'; expected"),
        ({"whole": 2}, "whole is 2; expected a share"),
        ({"learn": "all", "whole": 0}, "learn is 'all' and whole 0, but where each layer learns alone"),
        ({"precision": "float16"}, "precision is 'float16'"),
        ({"context_parallel": 2}, "context_parallel is 2; expected 1"),
    ],
)
def test_what_cannot_be_healed_is_said(changes, match, healed, tmp_path):
    with pytest.raises(ValueError, match=match):
        healed(tmp_path / "made", **changes)
    assert not [*tmp_path.glob("made*")]


def test_a_model_that_lacks_a_tokenizer_is_named_and_nothing_is_left(healed, bert, tmp_path):
    shutil.copytree(bert, tmp_path / "m", ignore=lambda _, names: {*names} - {"config.json", "model.safetensors"})
    with pytest.raises(ValueError, match=rf"^model {tmp_path}/m holds no tokenizer"):
        healed(tmp_path / "to", source=tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_the_place_of_the_new_model_is_looked_at_before_texts_and_models(healed, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=rf"^{tmp_path}/file/to cannot be written \(Not a directory"):
        healed(tmp_path / "file" / "to", source=tmp_path / "none", texts=[tmp_path / "none"])


def test_a_quantised_or_healed_model_is_refused_by_name(healed, unbroken, bert, tmp_path):
    quantised = tmp_path / "quantised"
    shutil.copytree(bert, quantised)
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quantised .* heal the model before quantisation"):
        healed(tmp_path / "made", quantised)
    with pytest.raises(ValueError, match="is healed already, from bert"):
        healed(tmp_path / "made", unbroken, num_landmarks="auto")


def test_a_model_with_exact_heads_keeps_them(healed, bert, tmp_path):
    layers = tuple(LayerChoice("nystrom", {"num_landmarks": 4, "exact_heads": [head]}) for head in (0, 2))
    AttentionPlan(layers).write(tmp_path / "plan.json")
    convert(ConvertOptions(bert, tmp_path / "planned", plan=tmp_path / "plan.json"))
    to = healed(tmp_path / "made", tmp_path / "planned", num_landmarks="auto", learning_rate=1e-4, whole=0.0)
    first, second = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "planned", to))
    assert second["attention_options"] == first["attention_options"]
    before, after = errors(to)
    assert after < before


@pytest.mark.long
def test_other_models_are_healed_too(healed, tmp_path):
    """A masked language model by its logits, an encoder of transformers, and a decoder by near_far."""
    torch.manual_seed(0)
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 32}
    llama = LlamaConfig(**SIZES, **BERT, num_key_value_heads=2)
    near_far = {"attention": "near_far", "num_landmarks": "auto"}
    near_far |= {"options": {"block_size": 8, "num_heavy": 2, "num_clusters": 2, "exact_up_to": 0}}
    for model, changes in (
        (BertForMaskedLM(BertConfig(**SIZES, **BERT)), {}),
        (DistilBertModel(DistilBertConfig(**SIZES, **sizes)), {"attention": "kernelized", "num_landmarks": "auto"}),
        (LlamaForCausalLM(llama), near_far),
    ):
        source = saved(model, tmp_path / type(model).__name__)
        to = healed(tmp_path / f"healed-{source.name}", source, whole=1, steps=12, evaluate_every=6, **changes)
        before, after = errors(to)
        assert after < before, source.name
        assert "not kept" not in (to / "README.md").read_text()
        if changes:
            assert type(model).from_pretrained(to).config._attn_implementation == changes["attention"]


@pytest.mark.long
def test_the_command_heals_and_needs_texts(bert, texts, tmp_path, capsys):
    words = ["heal", str(bert), "--to", str(tmp_path / "made"), "--num-landmarks", "4", "--device", "cpu"]
    words += ["--steps", "2", "--batch-size", "4"]
    assert main(words) == 2
    assert "texts names nothing: name files or folders of texts" in capsys.readouterr().err
    assert main([*words, "--texts", str(texts)]) == 0
    assert "Error of the last hidden states" in capsys.readouterr().out
    (row, *_) = read_rows(tmp_path / "made-run" / "rows.csv")
    assert row.command.startswith("nystrom heal bert --to made --texts texts.txt --steps 2 --batch-size 4")
    assert "--texts texts.txt" in row.command
    assert (tmp_path / "made-run" / "error.png").stat().st_size > 1000


@pytest.mark.long
def test_two_processes_share_the_texts(unbroken, bert, texts, torchrun, tmp_path):
    words = ["--num-landmarks", "4", "--steps", "6", "--batch-size", "4", "--evaluate-every", "2"]
    words += ["--learning-rate", "1e-3", "--device", "cpu", "--threads", "1", "--whole", ".5"]
    done = torchrun(2, "heal", bert, "--texts", texts, "--to", tmp_path / "made", *words)
    assert done.returncode == 0, done.stderr
    # float32, over the steps of Adam; other sums.
    assert errors(tmp_path / "made") == pytest.approx(errors(unbroken), rel=1e-3)
