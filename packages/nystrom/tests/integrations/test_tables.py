"""TabPFN and TabICL at random weights: contexts with an entry for each row give what their own attention gives."""

import gc
import sys

import pytest
import torch
from torch.testing import assert_close

tabpfn = pytest.importorskip("tabpfn.architectures")
tabicl = pytest.importorskip("tabicl")

from tabicl._model import attention  # noqa: E402
from tabicl._model.inference_config import InferenceConfig  # noqa: E402
from tabicl._model.tabicl import TabICL  # noqa: E402
from tabpfn.architectures.interface import PerformanceOptions  # noqa: E402
from tabpfn.architectures.kv_cache import KVCacheEntry  # noqa: E402
from tabpfn.architectures.shared.attention_backends import (  # noqa: E402
    recorded_attention_backends,
    registered_attention_backends,
)
from tabpfn.architectures.shared.scaled_dot_product_attention import scaled_dot_product_attention  # noqa: E402

from nystrom.integrations.tabicl import replace_tabicl  # noqa: E402
from nystrom.integrations.tabpfn import register, unregister  # noqa: E402

TRAIN, TEST = 40, 600
OF_ROWS_AND_COLUMNS = {"emsize": 12, "nlayers": 2, "nhead": 3, "features_per_group": 2}
OF_ROWS = {
    **{"embed_dim": 8, "dist_embed_num_blocks": 1, "dist_embed_num_heads": 2, "feat_agg_num_blocks": 1},
    **{"feat_agg_num_heads": 2, "feat_agg_num_cls_tokens": 2, "nlayers": 2, "icl_num_heads": 4},
    **{"decoder_head_dim": 4, "decoder_num_heads": 2, "dist_embed_num_inducing_points": 4},
}
SIZES = {
    "tabpfn_v2": OF_ROWS_AND_COLUMNS,
    "tabpfn_v2_5": OF_ROWS_AND_COLUMNS,
    "tabpfn_v2_6": OF_ROWS_AND_COLUMNS,
    "tabpfn_v3": OF_ROWS,
    "tabpfn_v3_5": OF_ROWS,
}


@pytest.fixture(autouse=True)
def unregistered():
    yield
    unregister()


def config_of(name):
    return tabpfn.ARCHITECTURES[name].parse_config({**SIZES[name], "max_num_classes": 10, "num_buckets": 5})[0]


@pytest.fixture(params=SIZES)
def model(request):
    """Each architecture with two layers, at weights so large that attention is far from uniform."""
    torch.manual_seed(0)
    model = tabpfn.ARCHITECTURES[request.param].get_architecture(config_of(request.param)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    return model


def predict(model, **more):
    source = torch.Generator().manual_seed(1)
    x = torch.randn(TRAIN + TEST, 1, 4, generator=source)
    y = torch.randint(3, (TRAIN, 1), generator=source).float()
    with torch.inference_mode():
        return model(x, y, task_type="multiclass", **more)


def test_with_an_entry_for_each_row_it_predicts_as_tabpfns_own_attention(model):
    expected = predict(model)
    # Columns attend, too: to a few tokens, which also are fewer than these rows.
    register(from_rows=TRAIN, from_queries=1, num_entries=12 * TRAIN)
    with recorded_attention_backends() as calls:
        out = predict(model)
    assert [each for each in calls if each is not None]
    # float32 rounding of softmax over entries in another order, through two layers.
    assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(out, expected)
    unregister()
    assert torch.equal(predict(model), expected)


def test_fewer_rows_and_gradients_are_left_to_tabpfn(model):
    expected = predict(model)
    register(from_rows=TRAIN + TEST + 100, num_entries=6)
    assert torch.equal(predict(model), expected)
    register(from_rows=1, from_queries=1, num_entries=6)
    with recorded_attention_backends() as calls:
        model(torch.randn(TRAIN + TEST, 1, 4), torch.zeros(TRAIN, 1), task_type="multiclass")
    assert set(calls) == {None}


@pytest.mark.parametrize("model", ["tabpfn_v3_5"], indirect=True)
@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_a_cache_is_compressed_once_and_its_contexts_go_with_it(model, dtype, monkeypatch):
    made = count_contexts(monkeypatch)
    _, cache = predict(model, return_kv_cache=True, performance_options=PerformanceOptions(kv_cache_dtype=dtype))
    test = torch.randn(TEST, 1, 4, generator=torch.Generator().manual_seed(2))
    labels = torch.zeros(TRAIN, 1)

    def ask(cache):
        with torch.inference_mode():
            return model(test, labels, task_type="multiclass", kv_cache=cache, x_is_test_only=True)

    expected = ask(cache)
    register(from_rows=TRAIN, from_queries=1, num_entries=12 * TRAIN)
    backend = registered_attention_backends()[0]
    first = ask(cache)
    # int8 keys are the same for both; float32 rounding of softmax in another order, through two layers.
    assert_close(first, expected, rtol=1e-4, atol=1e-5)
    of_layers = len(made)
    assert of_layers >= len(cache.kv)
    assert torch.equal(ask(cache), first)
    # The keys of the decoder are made anew by each call, those of the layers are not.
    assert len(made) - of_layers <= of_layers - len(cache.kv)
    assert backend.contexts.bytes_kept() > 0
    del cache.kv, cache
    gc.collect()
    assert backend.contexts.bytes_kept() == 0


@pytest.mark.parametrize("model", ["tabpfn_v3_5"], indirect=True)
@pytest.mark.parametrize("mode", ["fit_with_cache", "fit_preprocessors"])
@pytest.mark.parametrize("table", ["breast_cancer", "digits"])
def test_a_classifier_of_a_table_predicts_the_same(model, table, mode, monkeypatch):
    from sklearn import datasets
    from tabpfn import ModelSpecs, TabPFNClassifier
    from tabpfn.constants import ModelVersion
    from tabpfn.inference_config import InferenceConfig

    x, y = getattr(datasets, f"load_{table}")(return_X_y=True)
    x, y = x[:600], y[:600]
    specs = ModelSpecs(model, config_of("tabpfn_v3_5"), InferenceConfig.get_default("multiclass", ModelVersion.V2_5))

    def predict():
        classifier = TabPFNClassifier(
            n_estimators=1, model_path=specs, device="cpu", fit_mode=mode, ignore_pretraining_limits=True
        )
        return torch.from_numpy(classifier.fit(x[::2], y[::2]).predict_proba(x))

    expected, made = predict(), count_contexts(monkeypatch)
    register(from_rows=250, from_queries=512, num_entries=6 * 300)
    assert_close(predict(), expected, rtol=0, atol=1e-5)
    assert made


def count_contexts(monkeypatch):
    from nystrom.integrations import row_contexts

    made, own = [], row_contexts.near_far_context

    def counted(*args, **options):
        made.append(options)
        return own(*args, **options)

    monkeypatch.setattr(row_contexts, "near_far_context", counted)
    return made


@torch.no_grad()
def call(q, k, v, **more):
    return scaled_dot_product_attention(q, k, v, **more)


def sharp(rows=64, heads=4, shared=2, scale=30.0):
    source = torch.Generator().manual_seed(0)
    q = scale * torch.randn(1, TEST, heads, 8, generator=source)
    return q, *(torch.randn(1, rows, shared, 8, generator=source) for _ in range(2))


def test_a_tolerance_gives_exact_attention_where_the_context_is_too_far():
    q, k, v = sharp()
    expected = call(q, k, v)
    register(from_rows=1, from_queries=1, num_entries=12)
    assert (call(q, k, v) - expected).norm() > 0.3 * expected.norm()
    register(from_rows=1, from_queries=1, num_entries=12, tolerance=0.05)
    # float32 rounding of scores of some hundreds, which the other order of sums moves by 1e-5 of themselves.
    assert_close(call(q, k, v), expected, rtol=1e-4, atol=1e-5)
    entry = KVCacheEntry(k, v).quantize()
    quantized = call(q, None, None, quantized_kv=entry)
    unregister()
    assert_close(quantized, call(q, None, None, quantized_kv=entry), rtol=1e-4, atol=1e-5)


def test_a_prediction_depends_neither_on_the_first_call_nor_on_the_rows_beside_it():
    q, k, v = sharp(scale=2.0)
    register(from_rows=1, from_queries=1, num_entries=12)
    entry = KVCacheEntry(k, v).quantize()
    alone = call(q[:, :3], None, None, quantized_kv=entry)
    other = KVCacheEntry(k, v).quantize()
    call(q.flip(1), None, None, quantized_kv=other)
    assert_close(call(q, None, None, quantized_kv=other)[:, :3], alone)


def test_few_queries_are_exact_unless_their_keys_are_cached_in_int8():
    q, k, v = sharp(scale=2.0)
    entry = KVCacheEntry(k, v).quantize()
    expected, cached = call(q, k, v), call(q, None, None, quantized_kv=entry)
    # Two heads of 600 queries attend to each of two heads of keys.
    register(from_rows=64, from_queries=1201, num_entries=12)
    assert torch.equal(call(q, k, v), expected)
    assert not torch.equal(call(q, None, None, quantized_kv=entry), cached)
    register(from_rows=64, from_queries=1200, num_entries=12)
    assert not torch.equal(call(q, k, v), expected)


def test_values_of_other_rows_are_not_answered_from_an_earlier_context():
    q, k, v = sharp(scale=2.0)
    register(from_rows=1, from_queries=1, num_entries=12 * 64)
    call(q, k, v)
    assert_close(call(q, k, 2 * v), 2 * call(q, k, v))


def test_what_a_context_cannot_take_is_left_to_tabpfn_with_one_warning(monkeypatch):
    def refuse(*tensors, **options):
        raise ValueError("no")

    q, k, v = sharp(scale=1.0)
    expected = call(q, k, v)
    register(from_rows=1, from_queries=1, num_entries=12)
    monkeypatch.setattr("nystrom.integrations.row_contexts.near_far_context", refuse)
    with pytest.warns(UserWarning, match="TabPFN's own attention takes calls that nystrom cannot: no"):
        assert torch.equal(call(q, k, v), expected)
    # Warnings are errors.
    assert torch.equal(call(q, k, v), expected)


def test_registering_again_replaces_and_unregistering_twice_is_harmless():
    register(from_rows=7)
    register(from_rows=9)
    ours = [each for each in registered_attention_backends() if each.name == "nystrom"]
    assert [each.contexts.from_rows for each in ours] == [9]
    unregister()
    unregister()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"from_rows": 0}, "from_rows is 0; expected a whole number of at least 1"),
        ({"from_queries": 0}, "from_queries is 0; expected a whole number of at least 1"),
        ({"num_entries": 1}, "num_entries is 1; expected a whole number of at least 2"),
        ({"tolerance": -1}, "tolerance is -1; expected None, or a number of at least 0"),
    ],
)
def test_wrong_numbers_are_refused_and_change_nothing(options, message):
    before = registered_attention_backends()
    with pytest.raises(ValueError, match=message):
        register(**options)
    with pytest.raises(ValueError, match=message), replace_tabicl(**options):
        pass
    assert registered_attention_backends() == before


@pytest.fixture
def tabicl_model():
    torch.manual_seed(0)
    model = TabICL(
        embed_dim=8, col_num_blocks=1, col_nhead=2, col_num_inds=4, row_num_blocks=1, row_nhead=2, row_num_cls=2,
        icl_num_blocks=2, icl_nhead=2,
    ).eval()  # fmt: skip
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    return model


def full_precision():
    config = InferenceConfig()
    for part in (config.COL_CONFIG, config.ROW_CONFIG, config.ICL_CONFIG):
        part.use_amp = False
    return {"inference_config": config}


def table(rows, seed=1):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(1, rows, 4, generator=source), torch.randint(3, (1, TRAIN), generator=source).float()


@torch.inference_mode()
def test_tabicl_attends_through_contexts_within_the_block(tabicl_model, monkeypatch):
    made = count_contexts(monkeypatch)
    x, y = table(TRAIN + TEST)
    expected = tabicl_model(x, y, **full_precision())
    with replace_tabicl(from_rows=TRAIN, from_queries=1, num_entries=12 * TRAIN):
        out = tabicl_model(x, y, **full_precision())
    assert made
    assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(out, expected)
    assert torch.equal(tabicl_model(x, y, **full_precision()), expected)


@torch.inference_mode()
def test_tabicls_cached_rows_are_compressed_once(tabicl_model, monkeypatch):
    x, y = table(TRAIN)
    tabicl_model.forward_with_cache(x, y, **full_precision())
    asked = {"X_test": table(TEST, seed=2)[0], "use_cache": True, "store_cache": False, **full_precision()}
    expected = tabicl_model.forward_with_cache(**asked)
    made = count_contexts(monkeypatch)
    with replace_tabicl(from_rows=TRAIN, from_queries=1, num_entries=12 * TRAIN):
        first = tabicl_model.forward_with_cache(**asked)
        assert_close(first, expected, rtol=1e-5, atol=1e-5)
        count = len(made)
        assert count
        again = tabicl_model.forward_with_cache(**asked)
    assert torch.equal(again, first)
    assert len(made) == count


def test_another_version_of_tabicl_is_refused_and_left_as_it_is(monkeypatch):
    own = attention.sdpa_with_flattened_batch
    monkeypatch.setattr("nystrom.integrations.tabicl.version", lambda name: "2.3.0")
    with pytest.raises(ValueError, match=r"tabicl is 2\.3\.0; expected 2\.2\.0, whose"), replace_tabicl():
        pass
    assert attention.sdpa_with_flattened_batch is own


@pytest.mark.parametrize("name", ["tabpfn", "tabicl"])
def test_without_the_package_it_is_named(name, monkeypatch):
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.setitem(sys.modules, module, None)
    use = register if name == "tabpfn" else replace_tabicl().__enter__
    with pytest.raises(ModuleNotFoundError, match=f"needs {name}.*: pip install"):
        use()
    monkeypatch.undo()
