"""The errors of ranks that disagree, on all of them, instead of waiting for each other; run by `ranks.py`."""

import pytest
import torch
import torch.distributed as dist

from nystrom import build_attention
from nystrom.attention.functions import FUNCTIONS
from nystrom.attention.registry import METHODS
from nystrom.parallel import count_bytes


def checks():
    yield "disagreement", ranks_that_disagree_are_told_by_name
    yield "refusal", what_one_rank_refuses_all_refuse
    yield "methods", what_does_not_work_over_ranks_is_refused_by_name
    yield "second derivative", a_second_derivative_raises
    yield "group", what_is_no_group_raises
    yield "mesh", a_mesh_of_one_dimension_is_a_group
    yield "agreement", to_agree_takes_a_few_numbers


def attend(n=9, *, heads=2, width=4, batch=1, dtype=torch.float32, name="nystrom", gradient=False, s=None, **options):
    q = torch.randn(batch, heads, n, width, dtype=dtype, requires_grad=gradient)
    k = torch.randn(batch, heads, n if s is None else s, width, dtype=dtype)
    options = {"num_landmarks": 3} | options if name == "nystrom" else options
    projections = [torch.randn(1, 3, 16)] * 2 if name == "linformer" else []
    return FUNCTIONS[name](q, k, k, *projections, **{"group": dist.group.WORLD} | options)


def raises(match, *given, **options):
    with pytest.raises(ValueError, match=match) as caught:
        attend(*given, **options)
    assert "\n" not in str(caught.value)


def here(zero, other):
    return other if dist.get_rank() else zero


def ranks_that_disagree_are_told_by_name():
    all_of_it = "ranks of the group disagree: "
    raises(all_of_it + "num_landmarks is 3 on rank 0, 4 on rank 1. Pass the same", num_landmarks=here(3, 4))
    raises(r"\(batch, heads\) is \(1, 2\) on rank 0, \(1, 4\) on rank 1", heads=here(2, 4))
    raises(r"\(batch, heads\) is \(1, 2\) on rank 0, \(3, 2\) on rank 1", batch=here(1, 3))
    raises("head width is 4 on rank 0, 8 on rank 1", width=here(4, 8))
    raises("dtype is torch.float32 on rank 0, torch.float64 on rank 1", dtype=here(torch.float32, torch.float64))
    raises("keep is None on rank 0, given on rank 1", keep=here(None, torch.ones(1, 9, dtype=torch.bool)))
    raises("what has a gradient is nothing on rank 0, q on rank 1", gradient=here(False, True))
    raises("method is softmax on rank 0, nystrom on rank 1", name=here("softmax", "nystrom"))
    # They can go on after that.
    attend()


def what_one_rank_refuses_all_refuse():
    wrong = torch.ones(1, 8, dtype=torch.bool)
    told = here(r"rank 1 of the group has inputs that do not fit: keep has shape \(1, 8\)", r"^keep has shape \(1, 8\)")
    raises(told, keep=here(torch.ones(1, 9, dtype=torch.bool), wrong))
    raises(here(r"^q holds 5 tokens", r"rank 0 of the group .* q holds 5 tokens"), here(5, 9), s=9, name="longformer")
    keep = torch.ones(1, here(9, 5), dtype=torch.bool)
    told = here("keep is given for 9 queries and 5 keys", "rank 0 of the group has .* keep is given for 9 queries")
    raises(told, here(9, 5), s=here(5, 5), keep=keep)
    told = here("q holds 9 tokens and k holds 5, but near_far", "rank 0 of the group has inputs .* q holds 9 tokens")
    raises(told, here(9, 5), s=here(5, 5), name="near_far")


def what_does_not_work_over_ranks_is_refused_by_name():
    for name in [name for name, method in METHODS.items() if not method.over_ranks]:
        raises(f"group is given, but {name} does not work over ranks: leave it out, or use one of", name=name)
    raises("form is 'materialised'", name="softmax", form="materialised")
    raises("q holds 9 tokens and k holds 8, but the skip", 9, s=8, skip=torch.ones(2, 1, 3, 1))
    raises("weight has shape", skip=torch.ones(2, 1, 4, 1))
    heads = build_attention("softmax", num_heads=2, head_dim=4)
    heads.group, x, rank = dist.group.WORLD, torch.randn(1, 2, 9, 4), dist.get_rank()
    with pytest.raises(ValueError, match=r"skip is .*\(2, 1, 3, 1\) on rank 0, .*\(2, 1, 5, 1\) on rank 1"):
        heads(x, x, x, skip=torch.ones(2, 1, 3 + 2 * rank, 1))


def a_second_derivative_raises():
    for name in ("nystrom", "softmax"):
        x = torch.randn(1, 2, 9, 4, requires_grad=True)
        options = {"num_landmarks": 3} if name == "nystrom" else {}
        out = FUNCTIONS[name](x, x, x, group=dist.group.WORLD, **options)
        with pytest.raises(RuntimeError, match="second derivatives of attention over a group are not supported"):
            torch.autograd.grad(out.sum(), x, create_graph=True)


def what_is_no_group_raises():
    raises("group is a str; expected a torch.distributed.ProcessGroup", group="tokens")
    first = dist.new_group([0])
    if dist.get_rank():
        raises("group does not include this process", group=first)
    mesh = dist.init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tokens"))
    raises("group is a mesh of 2 dimensions", group=mesh)


def a_mesh_of_one_dimension_is_a_group():
    mesh = dist.init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tokens"))
    x = torch.randn(1, 2, 9, 4, generator=torch.Generator().manual_seed(0))
    expected = FUNCTIONS["softmax"](x, x, x, group=dist.group.WORLD)
    torch.testing.assert_close(FUNCTIONS["softmax"](x, x, x, group=mesh["tokens"]), expected, rtol=0, atol=0)


def to_agree_takes_a_few_numbers():
    with count_bytes() as counted:
        attend(0)
    # Four whole numbers to each of the others.
    assert (counted.total, counted.calls) == (32 * (dist.get_world_size() - 1), 1)
