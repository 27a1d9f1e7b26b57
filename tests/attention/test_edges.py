"""What an address does not tell, and numbers at the edge of float32: `attend` beside the kernel's usual inputs."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from kvcache import KVCache, attend
from tests.allocations import CountAllocations
from tests.attention.random_inputs import random_qkv
from tests.oracle import assert_close, attend_rows


@pytest.fixture
def qkv():
    return random_qkv(1, 2, 2, 1, 9, 8, dtype=torch.float32)


def test_another_default_device_changes_nothing(qkv):
    expected = attend(*qkv)
    with torch.device("meta"):
        assert torch.equal(attend(*qkv), expected)


def test_fake_tensors_have_the_shape_and_no_memory(qkv):
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert attend(*qkv).shape == (1, 2, 1, 8)


def test_a_store_whose_memory_was_freed_is_an_error(qkv):
    q, k, v = qkv
    k.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        attend(q, k, v)


@pytest.mark.parametrize("trace", [make_fx, lambda function: lambda q: torch.jit.trace(function, (q,))])
@pytest.mark.filterwarnings("ignore")
def test_tracing_records_what_is_computed(qkv, trace):
    q, k, v = qkv
    traced = trace(lambda q: attend(q, k, v))(q)
    assert torch.allclose(traced(2 * q), attend(2 * q, k, v), atol=1e-6)


@pytest.mark.parametrize("queries", [1, 3])
def test_tangents_go_through(queries):
    q, k, v = random_qkv(1, 2, 2, queries, 9, 8)
    with forward_ad.dual_level():
        result = attend(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
        tangent = forward_ad.unpack_dual(result).tangent
    step = 1e-6
    slope = (attend(q + step, k, v) - attend(q - step, k, v)) / (2 * step)
    assert torch.allclose(tangent, slope, atol=1e-6)


@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(8, 4), (4, 8)])
def test_channels_last_values_of_another_size_are_read_right(queries, dtype, sizes):  # case B12
    q, k, v = random_qkv(1, 2, 2, queries, 9, *sizes, dtype=dtype)
    expected, _ = attend_rows(q, k, v)
    assert_close(attend(*(x.contiguous(memory_format=torch.channels_last) for x in (q, k, v))), expected)


def test_tensors_that_stand_for_their_negative_are_read_right(qkv):
    q, k, v = qkv
    assert torch.allclose(attend(torch._neg_view(q), k, v), attend(-q, k, v), atol=1e-6)


def test_only_what_is_strided_is_copied():
    stored = torch.randn(1, 8, 3001, 64)[:, :, :3000]  # a view of a buffer, as caches give them
    q = torch.randn(1, 8, 1, 128)[..., ::2]
    with CountAllocations() as counted:
        attend(q, stored, stored)
    assert counted.allocated < stored.nbytes / 100


@pytest.mark.parametrize("softcap", [1e-50, 1e-40, 1e-20])
def test_a_tiny_softcap_gives_the_mean(qkv, softcap):
    q, k, v = qkv
    assert torch.allclose(attend(q, k, v, softcap=softcap), v.mean(dim=2, keepdim=True), atol=1e-6)


@pytest.mark.parametrize("softcap", [1e20, 3e38, 1e300])
def test_a_huge_softcap_caps_nothing(qkv, softcap):
    assert torch.allclose(attend(*qkv, softcap=softcap), attend(*qkv), atol=1e-6)


@pytest.mark.parametrize("logit", [math.inf, 2.5e38])
@pytest.mark.parametrize("lengths", [[9], [0]])
def test_a_sink_logit_that_takes_all_leaves_zeros(qkv, logit, lengths):
    output, lse = attend(*qkv, lengths=lengths, sink_logits=torch.tensor([logit, 0.0]), return_lse=True)
    assert (output[:, 0] == 0).all()
    assert lse[0, 0, 0] == torch.tensor(logit)
    assert output[:, 1].isfinite().all()


def test_starts_may_be_as_large_as_integers_get(qkv):
    output = attend(*qkv, starts=[2**63 - 1], window=3, sinks=2)
    assert (output == 0).all()


@pytest.mark.parametrize("storage", ["float32", "int8"])
@pytest.mark.parametrize("shift", [-3, 1])
def test_rows_of_the_cache_itself_may_be_appended(storage, shift):
    cache = KVCache(1, 1, 64, 400, storage=storage)
    rows = torch.randn(1, 1, 300, 64)
    cache.append(rows, rows)
    k, v = cache.update(rows[:, :, :0], rows[:, :, :0])
    expected = k.clone()
    if shift > 0:
        cache.truncate(shift)
        cache.append(k, v)
        assert torch.equal(cache.decoded_rows()[0][:, :, shift:], expected)
    else:
        cache.reset()
        cache.append(k[:, :, -shift:], v[:, :, -shift:])
        assert torch.equal(cache.decoded_rows()[0], expected[:, :, -shift:])


def test_a_compiled_caller_may_change_the_scale(qkv):
    function = torch.compile(lambda q, k, v, scale: attend(q, k, v, scale=scale), backend="eager", fullgraph=True)
    for scale in (0.1, 0.2, 0.3, 0.4):
        assert torch.allclose(function(*qkv, scale), attend(*qkv, scale=scale), atol=1e-6)
