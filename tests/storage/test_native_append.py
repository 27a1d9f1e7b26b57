"""Appending through the native kernel: the same bits as the codecs give, in place, in eager calls and in graphs."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from kvcache import BlockPool, CacheSpec, KVCache, LayerSpec, PagedCache, Sequence, SlidingWindowCache, native
from kvcache.storage import native_append
from kvcache.storage.blocks import BlockStore
from kvcache.storage.codecs import CODECS, Codec, FloatCodec, Storage
from tests.allocations import CountAllocations
from tests.kernels import INSTRUCTION_SETS, needs_compiler, needs_kernels

from .pools import MIXED, known_rows, new_ids, new_pool, whole_content

SOURCES = (torch.float32, torch.bfloat16, torch.float16)
STORAGES = ("float32", "bfloat16", "float16", "int8", "int4")
ADVERSARIAL = [
    *(0.0, -0.0, 0.5, 1.5, 2.5, 1.0, 255.0, 2047.0, 2049.0),
    *(1e-45, 1e-40, 2.0**-126, 2.0**-24, 2.0**-25, 3 * 2.0**-26, 2.0**-14, 6e-5, 6.1e-5, 1e-7),
    *(65504.0, 65519.99, 65520.0, 65536.0, 1e30, 3.4e38, 3.39e38, math.inf, math.nan),
]
NUMBERS = st.one_of(
    st.sampled_from(ADVERSARIAL + [-number for number in ADVERSARIAL]),
    st.floats(width=32),
    st.floats(-4, 4, width=32),
)


@pytest.fixture(params=[pytest.param(True, marks=needs_kernels, id="kernels"), pytest.param(False, id="no kernels")])
def kernels(request):
    if not request.param:
        request.getfixturevalue("no_kernels")


@pytest.fixture
def calls(monkeypatch):
    """The calls of the kernel: the number of tokens in each."""
    tokens: list[int] = []

    def append(*arguments: Any) -> None:
        tokens.append(arguments[3][2])
        kernels.append(*arguments)

    kernels = native.kernels
    monkeypatch.setattr(native, "kernels", kernels and SimpleNamespace(append=append, attend=kernels.attend))
    return tokens


def codecs_of(storage: str) -> list[Codec]:
    """Return the keys' codec and the values'."""
    return [CODECS[name] for name in (storage.split("/") * 2)[:2]]


def new_store(storage: str, num_blocks: int, heads: int, size: int, *head_dims: int) -> BlockStore:
    """Return blocks full of 77s, so that a byte that must not be written is seen."""
    kept = Storage(*codecs_of(storage))
    store = BlockStore(LayerSpec(heads, *head_dims), num_blocks, size, kept, torch.device("cpu"))
    for data in (store.k, store.v):
        data.fill_(77)
    return store


def written_in_torch(write: Any) -> None:
    """Call `write` with the kernels away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "kernels", None)
        write()


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, codec: Any, head_dim: int) -> None:
    """Compare kept rows; but how a NaN is written torch itself does not say (its vectors and its numbers differ)."""
    if isinstance(codec, FloatCodec):
        assert _equal_but_nan(actual, expected)
        return
    parameters = 4 * -(-head_dim // 32)
    (offsets, steps), (expected_offsets, expected_steps) = (
        rows[..., :parameters].contiguous().view(torch.int16).chunk(2, dim=-1) for rows in (actual, expected)
    )
    offsets, expected_offsets = (bits.contiguous().view(torch.float16) for bits in (offsets, expected_offsets))
    assert _equal_but_nan(offsets, expected_offsets)
    numbers = ~offsets.isnan()
    assert torch.equal(steps[numbers], expected_steps[numbers])
    assert torch.equal(actual[..., parameters:], expected[..., parameters:])


def _equal_but_nan(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    numbers = ~expected.isnan()
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.dtype.itemsize]
    same = actual.contiguous().view(bits) == expected.contiguous().view(bits)
    return bool(torch.equal(actual.isnan(), expected.isnan()) and same[numbers].all())


def check_write(storage: str, k: torch.Tensor, v: torch.Tensor, start: int = 1) -> None:
    """Write rows with the kernel and without it, and compare all bytes of the blocks."""
    batch, heads, tokens, k_dim = k.shape
    store, expected = (new_store(storage, batch, heads, start + tokens + 1, k_dim, v.shape[3]) for _ in range(2))
    store.write(k, v, start)
    written_in_torch(lambda: expected.write(k, v, start))
    assert_same_bits(store.k, expected.k, expected.storage.k, k_dim)
    assert_same_bits(store.v, expected.v, expected.storage.v, v.shape[3])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", SOURCES)
@given(data=st.data())
def test_every_number_is_kept_as_torch_keeps_it(dtype, storage, data):
    head_dim = data.draw(st.integers(1, 70))
    numbers = data.draw(st.lists(NUMBERS, min_size=1, max_size=2 * head_dim))
    rows = torch.tensor(numbers).repeat(-(-4 * head_dim // len(numbers)))[: 4 * head_dim].view(1, 2, 2, head_dim)
    for level in range(len(INSTRUCTION_SETS)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native_append, "BEST", level)
            check_write(storage, rows.to(dtype), rows.flip(0, 1, 2, 3).to(dtype))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_kept_as_torch_keeps_it(instruction_set, dtype, storage):
    rows = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(1, 1, -1, 32)
    check_write(storage, rows, rows)
    shuffled = rows.flatten()[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))].view(1, 1, -1, 32)
    check_write(storage, shuffled, rows)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("head_dim", [1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 130, 515])
def test_rows_of_every_length_and_scale(instruction_set, head_dim, storage):
    generator = torch.Generator().manual_seed(head_dim)
    for exponent in (-44, -24, -14, -3, 0, 8, 16, 40, 120):
        k, v = (torch.randn(2, 3, 5, size, generator=generator) * 2.0**exponent for size in (head_dim, head_dim + 1))
        check_write(storage, k, v)
        check_write(storage, (k + 2.0**exponent * 50).bfloat16(), v.half())


@needs_kernels
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8/int4", "float16/int8"])
def test_sources_with_strides(calls, storage):
    k, v = torch.randn(2, 2, 5, 3, 40)  # (B, T, H, D), as a model computes them
    check_write(storage, k.transpose(1, 2), v.transpose(1, 2))
    check_write(
        storage, k[:, :1, :, :33].expand(2, 4, 3, 33), v[..., 7:].transpose(1, 2)[:, :1].expand(2, 4, 5, 33)[:, :, :3]
    )
    check_write(storage, k[:, :0].transpose(1, 2), v[:, :0].transpose(1, 2))
    assert calls == [5, 3, 0]


@needs_kernels
def test_a_long_prefill_is_the_same_with_threads(calls):
    k, v = torch.randn(2, 2, 3, 700, 64)
    for storage in ("float32", "int8", "float16/int4"):
        check_write(storage, k, v)
    assert calls == [700] * 3


@needs_kernels
@pytest.mark.parametrize("storage", [*STORAGES, "int8/int4"])
def test_scattered_rows(instruction_set, storage):
    generator = torch.Generator().manual_seed(1)
    k = torch.randn(1, 2, 9, 33, generator=generator)
    v = torch.randn(1, 9, 2, 70, generator=generator).transpose(1, 2).bfloat16()
    places = torch.randperm(20, generator=generator)[:9]
    blocks, rows = places // 4, places % 4
    store, expected = (new_store(storage, 5, 2, 4, 33, 70) for _ in range(2))
    arguments = k, v, blocks, rows
    store.scatter(*arguments)
    written_in_torch(lambda: expected.scatter(*arguments))
    assert_same_bits(store.k, expected.k, expected.storage.k, 33)
    assert_same_bits(store.v, expected.v, expected.storage.v, 70)
    untouched = torch.ones(5, 4, dtype=torch.bool)
    untouched[blocks, rows] = False
    assert (store.k.transpose(1, 2)[untouched] == 77).all()


@needs_kernels
def test_caches_and_pools_use_the_kernel(calls):
    k, v = torch.randn(2, 1, 2, 3, 8)
    for storage in STORAGES:
        KVCache(1, 2, 8, 16, storage=storage).append(k, v)
        SlidingWindowCache(1, 2, 8, 4, storage=storage).append(k, v)
        pool = BlockPool(CacheSpec([LayerSpec(2, 8)]), 4, 4, storage)
        with pool.step([pool.new_sequence()], [[1, 2, 3]]) as step:
            step.append(0, k, v)
    assert calls == [3] * 15


@needs_kernels
def test_what_the_kernel_does_not_serve_is_stored_by_torch(calls):
    k, v = torch.randn(2, 1, 2, 3, 8)
    for storage, *rows in (
        ("float32", k.double(), v),
        ("float32", k, v.double()),
        ("float64", k, v),
        ("float64/int8", k, v),
        ("int8", k, v.transpose(2, 3).contiguous().transpose(2, 3)),
    ):
        cache = KVCache(1, 2, 8, 16, storage=storage)
        cache.append(*rows)
        for stored, codec, new in zip(cache.stored_rows(), codecs_of(storage), rows, strict=True):
            assert torch.equal(stored, codec.encode(new))
    with FakeTensorMode():
        cache = KVCache(1, 2, 8, 16)
        cache.append(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8))
    assert cache.seq_len == 3
    cache = KVCache(1, 2, 8, 16, device="meta")
    cache.append(k.to("meta"), v.to("meta"))
    assert not calls


def append_single(pool: BlockPool, sequences: list[Sequence], ids: list[list[int]]) -> None:
    """Run one step without attention, with rows in float32."""
    with pool.step(sequences, ids) as step:
        for layer in range(len(pool.spec.layers)):
            step.append(layer, *(rows.float() for rows in known_rows(pool.spec, layer, new_ids(step))))


@pytest.mark.parametrize("storage", [*STORAGES, "int8/int4", "float64"])
def test_a_pool_and_caches_hold_the_same_bytes_without_kernels(storage):
    def contents() -> list[Any]:
        pool = new_pool(storage=storage)
        sequences = [pool.new_sequence() for _ in range(3)]
        append_single(pool, sequences, [[1, 2, 3, 4, 5], [6], [7, 8, 9]])
        sequences.append(sequences[0].fork())
        append_single(pool, sequences, [[10], [11, 12], [13], [14]])
        generator = torch.Generator().manual_seed(0)
        caches = [
            KVCache(2, 2, 5, 40, storage=storage),
            SlidingWindowCache(2, 2, 5, 4, sinks=1, slack=2, storage=storage),
            PagedCache(2, 2, 5, 4, storage=storage),
        ]
        for count in (3, 1, 1, 12, 1, 1, 1, 6, 1):
            for cache in caches:
                cache.append(*torch.randn(2, 2, 2, count, 5, generator=generator))
        buffers = [data.view(torch.uint8).tolist() for cache in caches for data in (cache.k_cache, cache.v_cache)]
        return [whole_content(pool)[1], buffers]

    with_kernels: list[Any] = contents()
    without: list[Any] = []
    written_in_torch(lambda: without.extend(contents()))
    assert with_kernels == without


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_a_backward_that_needs_what_was_there_before_says_so(storage):
    cache = KVCache(1, 2, 8, 16, storage=storage)
    k, v = torch.randn(2, 1, 2, 3, 8)
    cache.append(k, v)
    version = cache.k_cache._version, cache.v_cache._version
    cache.append(k.requires_grad_(), v)
    assert cache.k_cache._version > version[0]
    assert cache.v_cache._version > version[1]
    assert not cache.k_cache.requires_grad
    if storage == "float32":
        weight = torch.ones(8, requires_grad=True)
        output = (cache.decoded_rows()[0] * weight).sum()
        cache.rollback(1)
        cache.append(k[:, :, :1], v[:, :, :1])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward()


@pytest.mark.usefixtures("kernels")
def test_a_cache_made_outside_of_inference_mode_is_written_within():
    cache = KVCache(1, 2, 8, 16)
    with torch.inference_mode():
        k, v = torch.randn(2, 1, 2, 3, 8)
        cache.append(k, v)
    cache.append(k, v)
    assert torch.equal(cache.k_cache[:, :, :6], torch.cat([k, k], dim=2))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_copy_of_a_cache_is_written_for_itself(storage):
    cache = KVCache(1, 2, 8, 16, storage=storage)
    k, v = torch.randn(2, 1, 2, 3, 8)
    cache.append(k, v)
    other, before = cache.copy(), cache.k_cache.clone()
    other.append(k, v)
    assert torch.equal(cache.k_cache, before)
    assert other.seq_len == 6


def append_and_read(cache: KVCache, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    cache.append(k, v)
    return cache.k_cache.float().sum(dim=(0, 1, 3)) * 2


@needs_compiler
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_compiled_append_is_one_graph_for_all_lengths(storage, requires_grad):
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(append_and_read, fullgraph=True)
    cache, expected = (KVCache(2, 2, 8, 32, storage=storage) for _ in range(2))
    address = cache.k_cache.data_ptr()
    # What inductor makes of the codec in torch rounds otherwise here and there.
    same_bits = storage != "int8" or native.kernels is not None
    for _ in range(20):
        k, v = torch.randn(2, 2, 2, 1, 8)
        k.requires_grad_(requires_grad)
        output = compiled(cache, k, v)
        torch.testing.assert_close(output, cache.k_cache.float().sum(dim=(0, 1, 3)) * 2)
        expected.append(k, v)
        for rows, expected_rows in zip(cache.decoded_rows(), expected.decoded_rows(), strict=True):
            torch.testing.assert_close(rows, expected_rows, rtol=0, atol=0 if same_bits else 0.05)
        if same_bits:
            assert torch.equal(cache.k_cache, expected.k_cache)
            assert torch.equal(cache.v_cache, expected.v_cache)
    assert cache.seq_len == 20
    assert cache.k_cache.data_ptr() == address
    assert counters["stats"]["unique_graphs"] <= 3
    assert not counters["graph_break"]


@needs_kernels
@needs_compiler
def test_a_compiled_append_does_not_copy_the_store():
    torch.compiler.reset()
    compiled = torch.compile(append_and_read, fullgraph=True)
    cache = KVCache(1, 2, 8, 4096)
    for _ in range(3):
        compiled(cache, *torch.randn(2, 1, 2, 1, 8))
    k, v = torch.randn(2, 1, 2, 1, 8)
    with torch.profiler.profile(profile_memory=True) as profile:
        compiled(cache, k, v)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    assert allocated < cache.k_cache.nbytes / 2  # the result is an eighth of it


@needs_kernels
def test_an_append_allocates_nothing():
    cache = KVCache(1, 2, 8, 64, storage="int8")
    k, v = torch.randn(2, 1, 2, 1, 8)
    with CountAllocations() as counted:
        cache.append(k, v)
    assert counted.allocated == counted.copied == 0


@pytest.mark.usefixtures("kernels")
def test_a_mixed_pool_takes_sources_of_every_dtype():
    for dtype in (*SOURCES, torch.float64):
        pool = new_pool(MIXED, storage="int8/float32")
        text = pool.new_sequence()
        with pool.step([text], [[1, 2, 3]]) as step:
            for layer, spec in enumerate(MIXED.layers):
                k, v = (torch.randn(1, spec.num_heads, 3, size, dtype=dtype) for size in spec.head_dims)
                step.append(layer, k, v)
                assert torch.equal(pool.stores[layer].v[0, :, :3], v[0].float())
        pool.check()
