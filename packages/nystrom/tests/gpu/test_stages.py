"""Each stage of the kernels, and its gradient, is the formula of `nystrom.reference` that its file names."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from nystrom import reference
from nystrom.gpu import inversion, landmark_attention, stages
from nystrom.gpu.launch import target_of
from nystrom.gpu.near_far import near_far_attention, near_far_stages
from nystrom.gpu.near_far.near_far_stages import Totals
from nystrom.gpu.program import Slot, key_of
from nystrom.gpu.stages import Small
from nystrom.landmarks import even_draws, uniform

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# float64 rounding through an inverse whose condition is a few thousand.
CLOSE = {"rtol": 1e-8, "atol": 1e-9}


def draw(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64).to(DEVICE).requires_grad_()


def each(formula, *tensors):
    """A formula of the reference, applied to each sequence and head."""
    b, h = tensors[0].shape[:2]
    return torch.stack([formula(*(x[i, j] for x in tensors)) for i in range(b) for j in range(h)]).unflatten(0, (b, h))


def slots_of(x):
    """Each slot of what a stage was given or gave."""
    if isinstance(x, Slot):
        return [x]
    return [slot for part in x for slot in slots_of(part)] if isinstance(x, tuple) else []


@pytest.fixture
def watched(monkeypatch):
    """A function that makes a stage copy what it gives, or a tuple of tensors that it is given, out of the workspace.

    It returns where the copies are among the tensors of the program.
    """

    def watch(module, stage, given=None):
        function, places = getattr(module, stage), []

        def run(x, *args):
            found = function(x, *args)
            program = getattr(x, "program", x)
            for slot in slots_of(found if given is None else next(arg for arg in args if isinstance(arg, given))):
                copy = program.result(slot.shape, slot.dtype)
                program.torch(lambda x, copy: copy.copy_(x), slot, copy)
                places.append(copy.memory)
            return found

        monkeypatch.setattr(module, stage, run)
        return places

    return watch


def taken(places, inputs, results):
    return [results[place - len(inputs)] for place in places]


def assert_same(found):
    for name, (mine, theirs) in found.items():
        torch.testing.assert_close(mine, theirs, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("gaussian", "m", "steps", "skipped", "masked"),
    [
        (False, 5, 6, True, False),
        (False, 5, 6, True, True),
        (False, 6, 6, False, False),
        (True, 6, 6, False, False),
        # Several blocks of landmarks; many are slow in the interpreter.
        pytest.param(False, 70, 1, False, False, marks=pytest.mark.long),
    ],
    ids=["one tile and a skip", "masks", "equal segments", "gaussian", "several blocks"],
)
def test_attention_through_landmarks(gaussian, m, steps, skipped, masked, watched):
    b, n, s, gamma = (1, 75, 80, 0.1) if m > 60 else (2, 42, 42, 0.1)
    q, k, v = (draw(b, 2, t, w, seed=i) for i, (t, w) in enumerate(((n, 8), (s, 8), (s, 6))))
    taps, grad = draw(2, 3, seed=4) if skipped else None, draw(b, 2, n, 6, seed=5).detach()
    keep, key_keep = (torch.ones(b, 2, t, dtype=torch.bool, device=DEVICE) for t in (n, s))
    if masked:
        # Padding at both ends, and a hole.
        for x in (keep, key_keep):
            x[0, :, :5] = x[0, :, 9] = x[1, :, 37:] = False
    attend, eye = reference.kernelized if gaussian else reference.softmax, torch.eye(m, dtype=q.dtype, device=DEVICE)
    if gaussian:
        draws, half = even_draws(m, q.device), m // 2
        rows = columns = torch.cat([uniform(q, half, draws=draws[:half]), uniform(k, m - half, draws=draws[half:])], 2)
    else:
        rows, columns = (
            each(lambda x, real: reference.segment_means(x[real], m), x, y) for x, y in ((q, keep), (k, key_keep))
        )
    matrix, roots = each(lambda x, y: attend(x, y, eye), rows, columns), torch.ones_like(rows[..., :1])
    if gaussian:
        # The steps of `reference.ridged_inverse`, each at hand.
        roots = (matrix.sum(dim=-1, keepdim=True) + gamma).rsqrt()
        matrix = roots * (matrix + gamma * eye) * roots.mT
    # Each side has its own copy, so that autograd gives each part of a gradient.
    queries, keys, sides = 1.0 * rows, 1.0 * columns, 1.0 * roots
    right = each(lambda x, y, z, real: attend(x, y[real], z[real]), queries, k, v, key_keep)
    inverse = each(lambda a: reference.iterative_inverse(a, steps), matrix)
    middle = sides * (inverse @ (sides * right))
    out = each(attend, q, keys, middle)
    if taps is not None:
        out = out + F.conv2d(v * key_keep[..., None], taps[:, None, :, None], padding=(1, 0), groups=2)
    out = out * keep[..., None]

    kind = "_blocks" if gaussian or m > 60 else ""
    stages_of = {name: watched(stages, name) for name in ("left_landmarks", "right_queries")}
    stages_of |= {name: watched(stages, f"{name}{kind}_backward") for name in ("middle", "table")}
    stages_of |= {"matrix": watched(inversion, "inverse_backward")}
    stages_of |= {"small": watched(stages, f"middle{kind}_backward", Small)}
    options = (target_of(q.device), m, 8**-0.5, steps, "paper", gamma if gaussian else -1.0)
    # The caller zeroes what padding holds.
    inputs = [(x * real[..., None]).detach() for x, real in ((q, keep), (k, key_keep), (v, key_keep))]
    masks = [x[:, 0].contiguous() if masked else None for x in (key_keep, keep)]
    inputs += [taps if taps is None else taps.detach(), *masks, None]
    kept, mine = landmark_attention.forward_program.__wrapped__(key_of(*inputs), *options)(*inputs)
    inputs = [grad, kept, *inputs]
    results = landmark_attention.backward_program.__wrapped__(key_of(*inputs), *options)(*inputs)
    of = {name: taken(places, inputs, results) for name, places in stages_of.items()}

    small = Small(*of["small"])
    table = rows if gaussian else torch.cat([rows, columns], dim=2)
    assert_same({"out": (mine, out), "landmarks": (small.table, table), "inverse": (small.inverse, inverse)})
    assert_same({"right": (small.right, right), "middle": (small.middle, middle)})
    given = {"q": q, "k": k, "v": v, "keys": keys, "queries": queries, "middle": middle, "right": right}
    given |= {"inverse": inverse, "matrix": matrix, "rows": rows, "columns": columns, "taps": taps, "roots": sides}
    given = {name: x for name, x in given.items() if x is not None and (gaussian or name != "roots")}
    wanted = dict(zip(given, torch.autograd.grad(out, list(given.values()), grad), strict=True))
    if gaussian:
        wanted["roots"] = wanted["roots"][..., 0]
    table_grad = wanted["rows"] if gaussian else torch.cat([wanted.pop("rows"), wanted["columns"]], dim=2)
    tokens = [x for x in results if x.shape in (q.shape, k.shape, v.shape, (2, 3))][-3 - skipped :]
    found = dict(zip(("q", "k", "v", "taps"), tokens, strict=False))
    # The kernel for one tile first gives the matrix again.
    found |= dict(zip(("middle", "right", "inverse", "roots"), of["middle"][0 if kind else 1 :], strict=False))
    found |= {"keys": of["left_landmarks"][0].sum(dim=0), "queries": of["right_queries"][0].sum(dim=0)}
    # All rows have the sum 1, so which of them attains the norm is open: a number that softmax takes from a whole row.
    free = [x - (0.0 if gaussian else x.mean(dim=-1, keepdim=True)) for x in (of["matrix"][0], wanted["matrix"])]
    assert_same({"matrix": free, **{name: (x, wanted[name]) for name, x in found.items() if name in wanted}})
    # Each token of a landmark receives its share.
    assert_same({"landmarks": (of["table"][0], small.share[..., None] * table_grad)})


@pytest.mark.long
@pytest.mark.parametrize(("reach", "masked"), [(0, False), (3, False), (3, True)], ids=["", "reach", "reach and masks"])
def test_attention_to_near_tokens_heavy_keys_and_clusters(reach, masked, watched):
    m, block, n = 4, 8, 43
    q, k, v = (draw(2, 2, n, w, seed=i) for i, w in enumerate((8, 8, 6)))
    cluster = torch.randint(m, (2, 2, n), generator=torch.Generator().manual_seed(3)).to(DEVICE, torch.int32)
    heavy = torch.tensor([3, 17, 30], device=DEVICE).expand(2, 2, -1).contiguous()
    cluster, grad = cluster.scatter(2, heavy, m), draw(2, 2, n, 6, seed=5).detach()
    # Blocks are counted from the first real token; a hole takes its place, and a heavy key may be missing.
    keep = torch.ones(2, n, dtype=torch.bool, device=DEVICE)
    found = torch.ones_like(heavy, dtype=torch.bool)
    if masked:
        keep[0, :5] = keep[0, 9] = keep[1, 40:] = False
        found, cluster = keep[:, None].expand(-1, 2, -1).gather(2, heavy), cluster.masked_fill(~keep[:, None], m)

    def attend(q, k, v, cluster, keep):
        places = (torch.arange(n, device=DEVICE) - keep.int().argmax())[keep]
        near = reference.near_keys(places, places, block_size=block, reach=reach)
        some = reference.near_far(q[keep], k[keep], v[keep], cluster=cluster[keep], num_clusters=m, near=near)
        return v.new_zeros(n, v.shape[1]).index_put((keep,), some)

    out = each(attend, q, k, v, cluster, keep[:, None].expand(-1, 2, -1))
    member = F.one_hot(cluster.long(), m + 1)[..., :m].to(k.dtype).mT
    number = member.sum(dim=-1)

    places = watched(near_far_stages, "attend", Totals)
    # The caller zeroes what padding holds.
    real = keep[:, None, :, None]
    grad = grad * real
    inputs = [x.detach() * real for x in (q, k, v)] + [heavy, found, cluster, keep if masked else None]
    options = (target_of(q.device), m, block, reach, 8**-0.5)
    results = near_far_attention.forward_program.__wrapped__(key_of(*inputs), *options)(*inputs)
    totals = Totals(*taken(places, inputs, results))
    assert_same({"means": (totals.means, member @ k / number[..., None]), "sums": (totals.sums, member @ v)})
    assert_same({"number": (totals.number, number)})
    (mine,) = (x for x in results if x.shape == out.shape)
    inputs = [grad, results[0], mine, *inputs]
    gradients = near_far_attention.backward_program.__wrapped__(key_of(*inputs), *options)(*inputs)
    wanted = torch.autograd.grad(out, (q, k, v), grad)
    pairs = zip([mine, *gradients], [out, *wanted], strict=True)
    assert_same({name: (x * real, y) for name, (x, y) in zip(("out", "q", "k", "v"), pairs, strict=True)})
