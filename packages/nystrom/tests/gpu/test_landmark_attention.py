"""The kernels agree with the reference in plain torch; without a GPU they run in Triton's interpreter."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from nystrom import NystromAttention, near_far_attention, nystrom_attention, reference, skyformer_attention
from nystrom.gpu.launch import splits
from nystrom.models import EncoderConfig, EncoderForMaskedLM

# Kernels in the interpreter.
pytestmark = pytest.mark.long

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
METHODS = {"nystrom": nystrom_attention, "skyformer": skyformer_attention}
# float64 rounding through an inverse whose condition is a few thousand.
CLOSE = {"rtol": 1e-8, "atol": 1e-9}


def draw(*shape, dtype=torch.float64, seed=0, size=1.0):
    g = torch.Generator().manual_seed(seed)
    x = size * torch.randn(shape, generator=g, dtype=torch.float64)
    return x.to(DEVICE, dtype).requires_grad_()


def draw_qkv(n, s, *, b=2, h=2, d=8, e=8, **more):
    return [draw(b, h, t, w, seed=i, **more) for i, (t, w) in enumerate(((n, d), (s, d), (s, e)))]


def masks(n, s, b=2):
    """Holes, padding at both ends, one sequence with few keys and one with few queries."""
    g = torch.Generator().manual_seed(n)
    keep, query_keep = (torch.rand(b, t, generator=g) < 0.7 for t in (s, n))
    keep[0, :3] = query_keep[1, -5:] = False
    keep[:, 5] = query_keep[:, 2] = True
    return keep.to(DEVICE), query_keep.to(DEVICE)


def assert_same(attend, inputs, **options):
    """Outputs and gradients of the kernels are those of the reference."""
    expected = attend(*inputs, **options, backend="torch")
    out = attend(*inputs, **options, backend="triton")
    torch.testing.assert_close(out, expected, **CLOSE)
    grad = draw(*out.shape, seed=9)
    leaves = [*inputs, *(x for x in (options.get("skip"),) if x is not None)]
    wanted = torch.autograd.grad(expected, leaves, grad)
    for mine, theirs in zip(torch.autograd.grad(out, leaves, grad), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


@pytest.mark.parametrize("masked", [False, True], ids=["all real", "masked"])
def test_what_all_tokens_have_in_common_costs_skyformer_no_digits(masked):
    # A power of two less, so that float32 holds the tokens of both as exactly.
    tokens = [((x * 2**8).round() / 2**8).detach() for x in draw_qkv(40, 45)]
    keep, query_keep = masks(40, 45) if masked else (None, None)

    def attend(inputs):
        inputs = [x.requires_grad_() for x in inputs]
        out = skyformer_attention(*inputs, num_landmarks=6, key_keep=keep, query_keep=query_keep, backend="triton")
        return out, *torch.autograd.grad(out, inputs, draw(*out.shape, seed=9).to(out.dtype))

    expected = attend(tokens)
    found = attend([(x.detach() + 1000.0 * (number < 2)).float() for number, x in enumerate(tokens)])
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() < 1e-5 * theirs.norm()


@pytest.mark.parametrize("attend", [*METHODS.values(), near_far_attention], ids=[*METHODS, "near_far"])
def test_a_backward_pass_under_autocast_keeps_its_dtypes(attend):
    inputs = draw_qkv(40, 40, dtype=torch.float32)
    sizes = (
        {"num_clusters": 4, "exact_up_to": 0, "num_heavy": 2} if attend is near_far_attention else {"num_landmarks": 6}
    )
    grads = []
    for under in (False, True):
        out = attend(*inputs, **sizes, backend="triton")
        with torch.autocast(DEVICE, torch.bfloat16, enabled=under):
            grads.append(torch.autograd.grad(out, inputs, torch.ones_like(out)))
    for mine, theirs in zip(*grads, strict=True):
        assert torch.equal(mine, theirs)


def worst(found, expected):
    """The largest error of a tensor, beside the largest number in what is expected."""
    return max(
        ((mine.double() - theirs).abs().max() / theirs.abs().max()).item()
        for mine, theirs in zip(found, expected, strict=True)
    )


NEAR_FAR = {"num_clusters": 8, "exact_up_to": 0, "num_heavy": 2, "block_size": 16, "reach": 8}


@pytest.mark.parametrize(
    ("attend", "sizes", "size"),
    [
        *((nystrom_attention, {"num_landmarks": 8}, size) for size in (1.0, 30.0, 2000.0, 1e5)),
        # More than one block of landmarks, whose normalisers are kept between the passes.
        (nystrom_attention, {"num_landmarks": 70}, 1e5),
        *((near_far_attention, NEAR_FAR, size) for size in (1.0, 30.0, 2000.0, 1e5)),
    ],
)
@pytest.mark.long
def test_wide_scores_cost_no_more_than_in_the_formula(attend, sizes, size):
    tokens = draw_qkv(160, 160, b=1, h=1, d=16, e=16)
    wide = [(x.detach() * (size if number < 2 else 1.0)).float() for number, x in enumerate(tokens)]

    def passes(dtype, backend):
        inputs = [x.to(dtype).requires_grad_() for x in wide]
        out = attend(*inputs, **sizes, backend=backend)
        return out, *torch.autograd.grad(out, inputs, draw(*out.shape, seed=9).to(dtype))

    expected, plain, found = (
        passes(torch.float64, "torch"),
        passes(torch.float32, "torch"),
        passes(torch.float32, "triton"),
    )
    assert all(x.isfinite().all() for x in found)
    # Scores that are computed again in another order differ by a unit in their last place, and so do their weights.
    scores = (wide[0] @ wide[1].mT).abs().max().item() / 4
    assert worst(found, expected) < 3 * worst(plain, expected) + min(1e-5 + 2**-23 * scores, 1e-3)


# 70 and 140 landmarks take more than one block, and the inverse in scratch memory.
@pytest.mark.parametrize(
    ("name", "m", "n", "s", "d", "e", "masked"),
    [
        ("nystrom", 2, 40, 65, 16, 8, True),
        ("nystrom", 7, 130, 50, 3, 20, False),
        ("nystrom", 66, 75, 130, 8, 8, True),
        ("skyformer", 2, 40, 65, 16, 8, False),
        ("skyformer", 7, 130, 50, 3, 20, True),
        pytest.param("skyformer", 66, 75, 130, 8, 8, False, marks=pytest.mark.slow),
    ],
)
def test_cross_attention_is_the_reference(name, m, n, s, d, e, masked):
    keep, query_keep = masks(n, s) if masked else (None, None)
    inputs = draw_qkv(n, s, h=1 if m > 60 else 2, d=d, e=e)
    # Many blocks are slow in the interpreter, so there are few iterations.
    steps = 1 if m > 60 else 6
    assert_same(METHODS[name], inputs, num_landmarks=m, pinv_steps=steps, key_keep=keep, query_keep=query_keep)


@pytest.mark.parametrize("m", [1, pytest.param(129, marks=pytest.mark.slow)])
def test_any_number_of_landmarks(m):
    assert_same(nystrom_attention, draw_qkv(m + 5, m + 9, b=1, h=1), num_landmarks=m, pinv_steps=1 if m > 60 else 6)


@pytest.mark.parametrize(("name", "masked"), [("nystrom", False), ("nystrom", True), ("skyformer", True)])
def test_sums_over_spans_of_tokens_are_joined(name, masked):
    n, s, m = 300, 420, 2
    assert all(splits(t, 1, m, 64, torch.device("cpu"))[0] > 2 for t in (n, s))
    keep, query_keep = masks(n, s) if masked else (None, None)
    if masked:
        # A span without a real token.
        keep[:, 128:256] = query_keep[:, :128] = False
        keep, query_keep = keep[:1], query_keep[:1]
    assert_same(METHODS[name], draw_qkv(n, s, b=1, h=1), num_landmarks=m, key_keep=keep, query_keep=query_keep)


@pytest.mark.parametrize("name", METHODS)
def test_few_real_queries_or_keys_are_exact(name):
    keep, query_keep = masks(40, 60, b=4)
    keep[0] = torch.arange(60, device=DEVICE) % 20 == 1
    query_keep[1] = torch.arange(40, device=DEVICE) % 15 == 4
    keep[2] = query_keep[3] = False
    assert_same(METHODS[name], draw_qkv(40, 60, b=4), num_landmarks=6, key_keep=keep, query_keep=query_keep)


@pytest.mark.parametrize(("taps", "masked"), [(1, False), (33, True), (131, False)])
def test_the_skip_is_added(taps, masked):
    keep = masks(70, 70)[0] if masked else None
    assert_same(
        nystrom_attention, draw_qkv(70, 70), num_landmarks=5, keep=keep, skip=draw(2, 1, taps, 1, seed=5, size=0.3)
    )


@pytest.mark.parametrize(("z0", "m"), [("sequence", 6), ("authors", 6), ("authors", 34)])
def test_every_start_value(z0, m):
    assert_same(nystrom_attention, draw_qkv(40, 45), num_landmarks=m, z0=z0, pinv_steps=1 if m > 30 else 3)


def test_no_iteration_is_the_start_value():
    assert_same(nystrom_attention, draw_qkv(30, 30), num_landmarks=4, pinv_steps=0)


def test_draws_of_a_generator_are_those_of_the_reference():
    inputs = draw_qkv(50, 50)
    outs = [
        skyformer_attention(*inputs, num_landmarks=8, backend=backend, generator=torch.Generator().manual_seed(3))
        for backend in ("torch", "triton")
    ]
    torch.testing.assert_close(*outs, **CLOSE)


@pytest.mark.parametrize("masked", [False, True])
def test_projections_are_read_in_their_layout(masked):
    leaf = draw(2, 60, 3, 2, 8)
    keep = masks(60, 60)[0] if masked else None
    q, k, v = (x.transpose(1, 2) for x in leaf.unbind(2))
    assert not q.is_contiguous()
    out = nystrom_attention(q, k, v, num_landmarks=5, keep=keep, backend="triton")
    # The output has the layout of the queries: merging its heads copies nothing.
    assert out.transpose(1, 2).is_contiguous()
    expected = nystrom_attention(q, k, v, num_landmarks=5, keep=keep)
    torch.testing.assert_close(out, expected, **CLOSE)
    grads = [torch.autograd.grad(x.square().sum(), leaf)[0] for x in (out, expected)]
    torch.testing.assert_close(*grads, **CLOSE)


def test_widths_that_are_not_contiguous_are_copied():
    q, k, v = (x.mT.contiguous().mT for x in draw_qkv(30, 30))
    out = nystrom_attention(q, k, v, num_landmarks=4, backend="triton")
    torch.testing.assert_close(out, nystrom_attention(q, k, v, num_landmarks=4), **CLOSE)


def by_formula(m):
    return lambda q, k, v: reference.by_sequence(lambda *x: reference.nystrom(*x[:3], num_landmarks=m), q, k, v)


@pytest.mark.parametrize(
    ("dtype", "n", "m", "d", "size"),
    [
        (torch.float32, 96, 16, 16, 1.0),
        (torch.float32, 64, 4, 64, 2.0),
        (torch.bfloat16, 64, 32, 32, 0.3),
        (torch.bfloat16, 64, 4, 64, 2.0),
        (torch.float16, 96, 16, 16, 1.0),
        (torch.float16, 64, 32, 32, 0.3),
    ],
)
def test_errors_are_at_most_twice_those_of_the_plain_formula(dtype, n, m, d, size):
    inputs = draw_qkv(n, n, h=1, d=d, e=d, dtype=dtype, size=size)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    grad = draw(2, 1, n, d, dtype=dtype, seed=9)

    def results(attend, inputs):
        out = attend(*inputs)
        return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]

    wanted = results(by_formula(m), exact)
    theirs = results(by_formula(m), inputs)
    mine = results(lambda *x: nystrom_attention(*x, num_landmarks=m, backend="triton"), inputs)
    for name, right, other, own in zip(("out", "q", "k", "v"), wanted, theirs, mine, strict=True):
        error, allowed = ((x.double() - right).norm() / right.norm() for x in (own, other))
        assert own.dtype == dtype
        assert error <= 2 * allowed, name


def test_the_same_inputs_give_the_same_bits():
    keep, query_keep = masks(90, 100)
    inputs = draw_qkv(90, 100, b=2, h=1, dtype=torch.float32)
    results = []
    for _ in range(2):
        out = nystrom_attention(*inputs, num_landmarks=6, key_keep=keep, query_keep=query_keep, backend="triton")
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for first, again in zip(*results, strict=True):
        torch.testing.assert_close(first, again, rtol=0, atol=0)


def test_between_the_passes_only_inputs_and_small_tensors_are_kept():
    n, m, b, h, d = 300, 8, 1, 2, 8
    inputs = draw_qkv(n, n, b=b, h=h, d=d, e=d)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        nystrom_attention(*inputs, num_landmarks=m, keep=masks(n, n)[0][:b], backend="triton")
    own = {x.data_ptr() for x in inputs}
    assert own <= {x.data_ptr() for x in kept}
    others = {x.data_ptr(): x.numel() for x in kept if x.data_ptr() not in own}
    # A mask of n booleans, and one tensor of six parts that begin at multiples of 128: four tables of
    # m rows, the inverse, and four numbers for each landmark.
    assert sum(others.values()) <= n + 6 * 127 + b * h * (4 * m * d + m * m + 4 * m)


def test_checkpointing_gives_the_same_gradients():
    inputs = draw_qkv(40, 40)
    attend = lambda *x: nystrom_attention(*x, num_landmarks=5, backend="triton")  # noqa: E731
    grads = [
        torch.autograd.grad(out.square().sum(), inputs)
        for out in (attend(*inputs), checkpoint(attend, *inputs, use_reentrant=False))
    ]
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_a_layer_adds_its_skip_in_the_same_pass(monkeypatch):
    layer = NystromAttention(16, 2, num_landmarks=4, conv_kernel_size=5).double().to(DEVICE)
    other = NystromAttention(16, 2, num_landmarks=4, conv_kernel_size=5, backend="triton").double().to(DEVICE)
    other.load_state_dict(layer.state_dict())
    x = draw(2, 30, 16)
    ignore = torch.arange(30, device=DEVICE) >= torch.tensor([[30], [21]], device=DEVICE)
    expected = layer(x, x, x, key_padding_mask=ignore)[0]
    wanted = torch.autograd.grad(expected.square().sum(), layer.parameters())
    for place in ("nystrom.attention.heads", "nystrom.attention.methods.nystrom"):
        monkeypatch.setattr(f"{place}.depthwise_skip", lambda *_, **__: pytest.fail("the convolution ran by itself"))
    out = other(x, x, x, key_padding_mask=ignore)[0]
    torch.testing.assert_close(out, expected, **CLOSE)
    for mine, theirs in zip(torch.autograd.grad(out.square().sum(), other.parameters()), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


def test_a_model_runs_on_the_kernels():
    small = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = {**small, "intermediate_size": 32, "max_position_embeddings": 64, "conv_kernel_size": 5}
    models = [
        EncoderForMaskedLM(EncoderConfig(**sizes, attention_options={"num_landmarks": 4, "backend": backend}))
        for backend in ("torch", "triton")
    ]
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    mask = (torch.arange(40) < torch.tensor([[40], [25]])).long().to(DEVICE)
    losses = [model.to(DEVICE).eval()(ids, attention_mask=mask, labels=ids).loss for model in models]
    # float32 rounding through two layers.
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.backward()
    for (name, x), y in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-5, msg=name)


# A warning about any linear layer at the end of a module.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
def test_distributed_wrappers_train_it(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        layer = NystromAttention(8, 2, num_landmarks=4, conv_kernel_size=3, backend="triton").to(DEVICE)
        x = draw(2, 20, 8, dtype=torch.float32).detach()
        DistributedDataParallel(layer)(x, x, x)[0].square().sum().backward()
        wanted = [p.grad.clone() for p in layer.parameters()]
        layer.zero_grad()
        fully_shard(layer, mesh=init_device_mesh(DEVICE, (1,)))
        layer(x, x, x)[0].square().sum().backward()
        for p, grad in zip(layer.parameters(), wanted, strict=True):
            # float32 rounding; with one process a sharded gradient is complete.
            torch.testing.assert_close(p.grad.full_tensor(), grad, rtol=1e-5, atol=1e-6)
    finally:
        torch.distributed.destroy_process_group()


def squares(q, k, v):
    return nystrom_attention(q, k, v, num_landmarks=3, backend="triton").square().sum()


def grad_of_grad(q, k, v):
    (first,) = torch.autograd.grad(squares(q, k, v), q, create_graph=True)
    torch.autograd.grad(first.sum(), q)


GONE = r"backend 'triton' has no .*derivative.*a method with second derivatives"
WAYS = {
    "grad of grad": grad_of_grad,
    "hvp": lambda q, k, v: torch.autograd.functional.hvp(lambda q: squares(q, k, v), q, q),
    "func": lambda q, k, v: torch.func.grad(lambda q: torch.func.grad(squares)(q, k, v).sum())(q),
    "forward mode": lambda q, k, v: torch.func.jvp(lambda q: squares(q, k, v), (q,), (q.detach(),)),
}


@pytest.mark.parametrize("way", WAYS)
def test_derivatives_that_are_not_there_raise_by_every_way(way):
    with pytest.raises(NotImplementedError, match=GONE):
        WAYS[way](*draw_qkv(12, 12, b=1, h=1, d=4, e=4))


def test_gradients_of_each_sequence_by_vmap():
    inputs = [x.detach() for x in (*draw_qkv(12, 12, b=2, h=1, d=4, e=4), draw(1, 1, 3, 1, seed=5))]

    def loss(q, k, v, skip, backend="triton"):
        # A batch of one.
        return nystrom_attention(q[None], k[None], v[None], num_landmarks=3, skip=skip, backend=backend).square().sum()

    mine = torch.func.vmap(torch.func.grad(loss, (0, 1, 2, 3)), in_dims=(0, 0, 0, None))(*inputs)
    for i in range(2):
        alone = [x.clone().requires_grad_() for x in (*(x[i] for x in inputs[:3]), inputs[3])]
        theirs = torch.autograd.grad(loss(*alone, backend="torch"), alone)
        for x, y in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x[i], y, **CLOSE)
