"""Who attends to whom is declared: a layer gives the same, or raises the same, however it is called."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from nystrom import MultiheadAttention

METHODS = {
    "nystrom": {"num_landmarks": 4},
    "near_far": {"block_size": 8, "reach": 2, "num_heavy": 2, "num_clusters": 4, "exact_up_to": 0},
    "skyformer_softmax": {"num_landmarks": 4},
    "informer": {"num_queries": 4, "num_samples": 4},
    "longformer": {"window": 5},
}
every_method = pytest.mark.parametrize("method", METHODS)
UNSAID = (
    r"query and key are two tensors of 40 tokens, .* call layer\(x\), or .*self_attention=True;.*self_attention=False"
)


def layer_of(method, self_attention=None, **options):
    torch.manual_seed(0)
    layer = MultiheadAttention(16, 2, method=method, self_attention=self_attention, **METHODS[method], **options)
    return layer.double().eval()


def inputs():
    x = torch.randn(2, 40, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(40) >= torch.tensor([[40], [30]])


@every_method
@pytest.mark.parametrize("conv_kernel_size", [None, 3])
def test_one_tensor_is_self_attention_and_so_are_three_that_are_declared(method, conv_kernel_size):
    layer, declared = (layer_of(method, said, conv_kernel_size=conv_kernel_size) for said in (None, True))
    x, mask = inputs()
    expected = layer(x, key_padding_mask=mask)[0]
    assert torch.equal(layer(x, x, x, key_padding_mask=mask)[0], expected)
    assert torch.equal(declared(x, x.clone(), x.clone(), key_padding_mask=mask)[0], expected)
    assert torch.equal(declared(x, key_padding_mask=mask)[0], expected)


@pytest.mark.refuses
@every_method
def test_equal_tensors_raise_where_it_would_make_a_difference(method):
    layer, (x, mask) = layer_of(method), inputs()
    with pytest.raises(ValueError, match=UNSAID):
        layer(x, x.clone(), x.clone(), key_padding_mask=mask)
    if method in ("near_far", "longformer"):
        with pytest.raises(ValueError, match=UNSAID):
            layer(x, x.clone(), x.clone())
    else:
        # Without a mask, or with one of each side, both readings are one.
        torch.testing.assert_close(layer(x, x.clone(), x.clone())[0], layer(x)[0])
        real = ~mask
        both = layer(x, x.clone(), x.clone(), key_padding_mask=mask, query_padding_mask=mask)[0]
        torch.testing.assert_close(both[real], layer(x, key_padding_mask=mask)[0][real])


@pytest.mark.refuses
def test_what_contradicts_the_declaration_raises():
    x, mask = inputs()
    with pytest.raises(ValueError, match=r"query came alone, .* self_attention=False: also pass key and value"):
        layer_of("nystrom", False)(x)
    with pytest.raises(ValueError, match=r"query holds 40 tokens and key 30, .* self_attention=True"):
        layer_of("nystrom", True)(x, x[:, :30], x[:, :30])
    with pytest.raises(ValueError, match=r"query_padding_mask is given for self-attention"):
        layer_of("nystrom", True)(x, x, x, key_padding_mask=mask, query_padding_mask=mask)
    with pytest.raises(ValueError, match=r"self_attention is False, .* longformer attention takes .* another method"):
        layer_of("longformer", False)


class Transposed(nn.Module):
    """Three views of one tensor, as in a model whose tokens come first."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, x, mask):
        return self.attend(*(x.transpose(0, 1) for _ in range(3)), key_padding_mask=mask)[0]


@pytest.mark.long
@every_method
def test_three_transposes_give_the_same_in_eager_compiled_and_exported(method):
    (x, mask), layer = inputs(), layer_of(method, True)
    expected, model, swapped = layer(x, key_padding_mask=mask)[0], Transposed(layer), x.transpose(0, 1).contiguous()
    assert torch.equal(model(swapped, mask), expected)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(swapped, mask), expected)
    exported = torch.export.export(model, (swapped, mask)).module()
    torch.testing.assert_close(exported(swapped, mask), expected)
    torch.compiler.reset()


@pytest.mark.refuses
def test_three_transposes_of_an_undeclared_layer_raise_in_eager_compiled_and_exported():
    (x, mask), model = inputs(), Transposed(layer_of("near_far"))
    swapped = x.transpose(0, 1).contiguous()
    for call in (model, torch.compile(model, backend="aot_eager"), lambda *x: torch.export.export(model, x)):
        with pytest.raises(Exception, match="nothing says whether these are the same"):
            call(swapped, mask)
    torch.compiler.reset()


@every_method
def test_a_hook_that_casts_each_argument_changes_nothing(method):
    layer, (x, mask) = layer_of(method, True), inputs()
    expected = layer(x.float().double(), key_padding_mask=mask)[0]
    layer.register_forward_pre_hook(lambda module, args: tuple(a.double() for a in args))
    single = x.float()
    assert torch.equal(layer(single, single, single, key_padding_mask=mask)[0], expected)


@every_method
def test_a_reentrant_checkpoint_needs_the_declaration(method):
    """The checkpoint's second pass detaches each argument anew."""
    mask, gradients = inputs()[1], []
    layer = layer_of(method, True, conv_kernel_size=3)
    for call in (layer, lambda *args: checkpoint(layer, *args, use_reentrant=True)):
        x = inputs()[0].requires_grad_()
        call(x, x, x, mask, False, None, True, False)[0].square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)
    layer.self_attention = None
    loss = checkpoint(layer, x, x, x, mask, False, None, True, False, use_reentrant=True)[0].sum()
    with pytest.raises(ValueError, match="nothing says whether these are the same"):
        loss.backward()


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


# FSDP2 casts each argument apart.
@every_method
def test_fsdp_in_bfloat16_on_the_attention_itself_changes_nothing(method, one_rank):
    layer, (x, mask) = layer_of(method, True).float(), inputs()
    expected = copy.deepcopy(layer).bfloat16()(x.bfloat16(), key_padding_mask=mask)[0]
    fully_shard(layer, mesh=one_rank, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    single = x.float()
    with torch.no_grad():
        out = layer(single, single, single, key_padding_mask=mask)[0]
    assert torch.equal(out, expected)


@pytest.mark.refuses
def test_fsdp_on_an_undeclared_layer_raises(one_rank):
    layer, (x, mask) = layer_of("nystrom").float(), inputs()
    fully_shard(layer, mesh=one_rank, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    single = x.float()
    with pytest.raises(ValueError, match="nothing says whether these are the same"):
        layer(single, single, single, key_padding_mask=mask)
