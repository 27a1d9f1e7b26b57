"""The native kernel: each instruction set, each storage, against float64; and the package without it."""

import ctypes
import math
import mmap
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from kvcache import InvalidValueError, attend, native
from kvcache.attention import cpu
from kvcache.attention.arguments import check_arguments
from kvcache.attention.reference import reference_attention
from kvcache.storage.codecs import CODECS
from tests.attention.random_inputs import NAN, random_qkv
from tests.kernels import needs_compiler, needs_kernels
from tests.oracle import assert_close, attend_rows

STORAGES = ["float32", "bfloat16", "float16", "int8", "int4"]
HEAD_DIMS = [1, 3, 8, 11, 12, 13, 33, 64, 80, 96, 128, 256, 512]


@needs_compiler
def test_where_there_is_a_compiler_the_kernel_loads():
    assert native.kernels is not None, native.missing_because
    assert "portable" in native.kernels.INSTRUCTION_SETS


@needs_kernels
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux lists a process's threads")
def test_released_threads_are_gone_and_come_back():
    def threads():
        return {entry.name for entry in Path("/proc/self/task").iterdir()}

    def until(condition):
        end = time.monotonic() + 10  # the kernel lists a thread for a moment after it was joined
        while not condition():
            assert time.monotonic() < end, "it never comes"
            time.sleep(0.001)

    numbers, wanted = torch.randn(3_000_000), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        powers = numbers.exp()
        working = threads()
        native.release_threads()
        native.release_threads()  # there are none any more
        until(lambda: len(working - threads()) == 2)
        assert torch.get_num_threads() == 3
        left = threads()
        assert torch.equal(numbers.exp(), powers)
        assert len(threads() - left) == 2
    finally:
        torch.set_num_threads(wanted)


def reference(q, k, v, **options):
    """Return the float64 result over what is stored, decoded."""
    names = ("block_table", "lengths", "starts", "window", "scale", "softcap", "sink_logits")
    arguments = {**dict.fromkeys(names), "sinks": 0, "return_lse": True, **options}
    decoded = [x.double() if isinstance(x, torch.Tensor) else x.decode(torch.float32).double() for x in (k, v)]
    return reference_attention(check_arguments(q.double(), *decoded, **arguments))


def relative_error(output, expected):
    """Return the largest error of a row (a query of one head) over that row's largest value."""
    scale = expected.abs().amax(dim=-1).clamp(min=1e-30)
    return ((output.double() - expected).abs().amax(dim=-1) / scale).max().item()


def error_over_values(output, expected, v):
    """Return the largest error over the largest value: with few channels a weighted mean of values may be near 0."""
    values = v if isinstance(v, torch.Tensor) else v.decode(torch.float32)
    largest = values.double().nan_to_num().abs().max().clamp(min=1e-30)
    return ((output.double() - expected).abs().max() / largest).item()


def assert_equals_reference(case):
    """Compare output and log-sum-exp of a call; errors grow with the scores, whose size is 1 with the usual scale."""
    q, k, v, options = case
    expected, expected_lse = reference(q, k, v, **options)
    output, lse = attend(q, k, v, return_lse=True, **options)
    size = 1 if options["scale"] is None else max(1, abs(options["scale"]) * q.shape[3] ** 0.5)
    assert error_over_values(output, expected, v) < 2e-6 * size
    seen = expected_lse > -math.inf
    assert torch.equal(lse > -math.inf, seen)
    assert torch.allclose(lse[seen].double(), expected_lse[seen], rtol=2e-6, atol=2e-5 * size)
    assert (output[~seen] == 0).all()


def stored(rows, storage):
    codec = CODECS[storage]
    return codec.readable(codec.encode(rows), rows.shape[-1])


def scattered(store, order, block_size, extra=2):
    """Return blocks of a (B, Hkv, S, width) tensor in a given order, among blocks of NaN (or 255) nobody owns."""
    _, kv_heads, slots, width = store.shape
    poison = 255 if store.dtype == torch.uint8 else NAN
    blocks = torch.full((len(order) + extra, kv_heads, block_size, width), poison).to(store.dtype)
    blocks[order] = store.unflatten(2, (slots // block_size, block_size)).transpose(1, 2).flatten(0, 1)
    return blocks


@st.composite
def cases(draw):
    """Draw the arguments of a call, stores in blocks or not, everything that no query sees poisoned."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 10))
    batch = draw(st.integers(1, 3))
    # To both sides of what shares one reading of the keys and values, which is 32.
    queries = draw(st.integers(1, 8) | st.integers(9, 70) | st.sampled_from([31, 32, 33, 64, 65]))
    head_dim, v_head_dim = draw(st.sampled_from(HEAD_DIMS)), draw(st.sampled_from(HEAD_DIMS))
    k_storage, v_storage = draw(st.sampled_from(STORAGES)), draw(st.sampled_from(STORAGES))
    block_sizes = [1, 2, 3, 5, 16, 17, *([64, 100] if queries <= 8 else [])]
    block_size, num_blocks = draw(st.sampled_from(block_sizes)), draw(st.integers(1, 9))
    slots = block_size * num_blocks
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    q, k, v = (
        torch.randn(batch, heads, length, dim, generator=generator)
        for heads, length, dim in (
            (kv_heads * group, queries, head_dim),
            (kv_heads, slots, head_dim),
            (kv_heads, slots, v_head_dim),
        )
    )
    per_row = st.lists(st.integers(0, slots), min_size=batch, max_size=batch)
    options = {
        "lengths": draw(st.none() | per_row),
        "starts": draw(st.none() | per_row),
        "window": draw(st.none() | st.integers(1, slots)),
        "sinks": draw(st.integers(0, 6)),
        "scale": draw(st.sampled_from([None, None, -0.4, 0.0, 0.3])),
        "softcap": draw(st.none() | st.floats(0.5, 50.0)),
        "sink_logits": torch.randn(q.shape[1], generator=generator) if draw(st.booleans()) else None,
    }
    for row in range(batch):
        length = slots if options["lengths"] is None else options["lengths"][row]
        start = 0 if options["starts"] is None else options["starts"][row]
        for rows in (k, v):
            rows[row, :, length:], rows[row, :, :start] = NAN, NAN
    k, v = stored(k, k_storage), stored(v, v_storage)
    if draw(st.booleans()):
        order = torch.randperm(batch * num_blocks, generator=generator)
        k, v = (
            scattered(x, order, block_size)
            if isinstance(x, torch.Tensor)
            else x.with_data(scattered(x.data, order, block_size))
            for x in (k, v)
        )
        options["block_table"] = order.view(batch, num_blocks)
    return q, k, v, options


@pytest.mark.usefixtures("instruction_set")
@settings(max_examples=150)
@given(case=cases())
def test_every_option_over_every_storage_equals_the_reference(case):
    assert_equals_reference(case)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("length", "queries", "head_dim"),
    [(4096, 1, 128), (4096, 4, 64), (1000, 8, 80), (77, 1, 256), (1000, 33, 80), (300, 75, 128)],
)
@pytest.mark.usefixtures("instruction_set")
def test_the_kernel_adds_no_error_of_its_own(storage, length, queries, head_dim):
    q, k, v = random_qkv(1, 8, 2, queries, length, head_dim, dtype=torch.float32)
    k, v = stored(k, storage), stored(v, storage)
    expected, _ = reference(q, k, v)
    limit = 2e-6 if storage == "float32" else 1e-5
    assert relative_error(attend(q, k, v), expected) < limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("instruction_set")
def test_16_bit_queries_are_rounded_once_at_the_end(dtype):
    q, k, v = random_qkv(2, 6, 2, 3, 200, 64, dtype=dtype)
    exact, _ = reference(q, k, v)
    assert (attend(q, k, v) == exact.to(dtype)).float().mean() > 0.99  # but where float32 sums fall on a tie
    assert relative_error(attend(q, k, v), exact) < 2 * torch.finfo(dtype).eps


@needs_kernels
def test_a_result_depends_neither_on_threads_nor_on_the_rest_of_the_batch():
    q, k, v = random_qkv(3, 8, 2, 1, 3000, 64, dtype=torch.float32)
    lengths = [3000, 17, 1200]
    threads = torch.get_num_threads()
    together = attend(q, k, v, lengths=lengths)
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            assert torch.equal(attend(q, k, v, lengths=lengths), together)
    finally:
        torch.set_num_threads(threads)
    for row, length in enumerate(lengths):
        alone = attend(q[row : row + 1], k[row : row + 1], v[row : row + 1], lengths=[length])
        assert torch.equal(alone, together[row : row + 1])


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("layout", ["token first", "slice of a buffer", "expanded", "every second channel", "odd"])
def test_strided_inputs_equal_contiguous_ones(layout):  # case B12
    q, k, v = random_qkv(2, 6, 2, 2, 70, 24, dtype=torch.float32)
    if layout == "expanded":
        k, v = (x[:1].expand(2, -1, -1, -1) for x in (k, v))
    expected = attend(*(x.contiguous() for x in (q, k, v)))
    if layout == "token first":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif layout == "slice of a buffer":
        q, k, v = (torch.cat([x, torch.full_like(x, NAN)], dim=2)[:, :, : x.shape[2]] for x in (q, k, v))
    elif layout == "every second channel":
        q, k, v = (torch.stack([x, torch.full_like(x, NAN)], dim=-1).flatten(-2)[..., ::2] for x in (q, k, v))
    elif layout == "odd":  # rows that start anywhere
        q, k, v = (torch.cat([torch.full_like(x[..., :3], NAN), x], dim=-1)[..., 3:] for x in (q, k, v))
    assert torch.equal(attend(q, k, v), expected)


def at_the_end_of_memory(rows):
    """Return a copy whose last byte is the last that can be read: of the page behind it a read is a crash."""
    size = -(-rows.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    behind = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size)
    assert ctypes.CDLL(None).mprotect(behind, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    numbers = torch.frombuffer(memory, dtype=rows.dtype, offset=size - rows.nbytes, count=rows.numel())
    return numbers.view(rows.shape).copy_(rows)


@pytest.mark.skipif(sys.platform == "win32", reason="protects memory as POSIX does")
@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("head_dim", [1, 3, 8, 11, 12, 13, 33, 80, 128])
def test_nothing_is_read_behind_the_last_row(storage, head_dim):
    q, k, v = random_qkv(2, 4, 2, 2, 35, head_dim, dtype=torch.float32)
    codec = CODECS[storage]
    k, v = codec.encode(k), codec.encode(v)
    expected, output = (
        attend(q, *(codec.readable(rows, head_dim) for rows in both))
        for both in ((k, v), map(at_the_end_of_memory, (k, v)))
    )
    assert torch.equal(output, expected)


@pytest.mark.parametrize("head_dims", [(513, 513), (513, 8), (8, 513)], ids=str)
def test_larger_heads_than_the_kernel_has_room_for_go_through_pytorch(monkeypatch, head_dims):
    monkeypatch.setattr(native, "kernels", SimpleNamespace())  # any use of it fails
    q, k, v = random_qkv(1, 4, 2, 2, 40, *head_dims, dtype=torch.float32)
    expected, _ = reference(q, k, v)
    assert_close(attend(q, k, v), expected)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("poison", [NAN, math.inf])
def test_what_a_query_sees_is_not_hidden(poison):
    q, k, v = random_qkv(1, 4, 1, 1, 40, 16, dtype=torch.float32)
    k[0, 0, 7] = poison
    assert attend(q, k, v).isnan().all()


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("scale", [1e-6, 1.0, 300.0])
def test_scores_of_any_size_are_stable(scale):
    q, k, v = random_qkv(1, 4, 2, 2, 600, 64, dtype=torch.float32)
    expected, expected_lse = reference(q, k, v, scale=scale)
    output, lse = attend(q, k, v, scale=scale, return_lse=True)
    assert output.isfinite().all()
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-6)
    if scale < 100:  # beyond, which key wins is decided by the last bit of a float32 score
        assert relative_error(output, expected) < 1e-5


@pytest.mark.usefixtures("instruction_set")
def test_many_queries_with_softcap_are_served_too():
    q, k, v = random_qkv(1, 4, 2, 75, 1300, 32, dtype=torch.float32)
    expected, _ = reference(q, k, v, softcap=20.0, window=600, sinks=5)
    assert_close(attend(q, k, v, softcap=20.0, window=600, sinks=5), expected)


@needs_kernels
@pytest.mark.parametrize("window", [None, 3])
def test_numbers_out_of_range_are_named_where_the_kernel_reads_them(window):
    q, k, v = random_qkv(2, dtype=torch.float32)
    table = torch.zeros(2, 1, dtype=torch.int64)
    for options, message in (
        ({"lengths": [1, 10]}, r"lengths holds 10; expected every entry in \[0, 9\]"),
        ({"lengths": [-1, 1]}, "lengths holds -1"),
        ({"starts": [0, -2]}, "starts holds -2; expected every entry >= 0"),
        ({"block_table": table + 2}, r"block_table holds 2; expected a block in \[0, 2\)"),
        ({"block_table": table - 1}, "block_table holds -1"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            attend(q, k, v, window=window, **options)


class TestWhereSdpaIsFaster:
    """Asked of the rule itself, as both ways give the same numbers."""

    @staticmethod
    def is_faster(monkeypatch, queries, storage, amx):
        monkeypatch.setattr(cpu, "has_amx", lambda: amx)
        return cpu._sdpa_is_faster(queries, stored(torch.zeros(1, 1, 4, 32), storage))

    @pytest.mark.parametrize("storage", STORAGES)
    @pytest.mark.parametrize("amx", [False, True])
    def test_never_for_few_queries(self, monkeypatch, storage, amx):
        for queries in (1, 8, 32):
            assert not self.is_faster(monkeypatch, queries, storage, amx)

    @pytest.mark.parametrize("storage", STORAGES)
    @pytest.mark.parametrize("amx", [False, True])
    def test_where_all_results_at_once_would_take_much_memory(self, monkeypatch, storage, amx):
        assert self.is_faster(monkeypatch, 4097, storage, amx)

    @pytest.mark.parametrize("storage", STORAGES)
    @pytest.mark.parametrize("queries", [33, 4096])
    def test_between_only_where_the_processor_multiplies_bfloat16(self, monkeypatch, storage, queries):
        assert not self.is_faster(monkeypatch, queries, storage, amx=False)
        assert self.is_faster(monkeypatch, queries, storage, amx=True) == (storage == "bfloat16")


@needs_kernels
def test_vmap_takes_the_way_through_pytorch():
    q, k, v = random_qkv(3, 4, 2, 1, 9, 8, dtype=torch.float32)
    mapped = torch.func.vmap(lambda q, k, v: attend(q[None], k[None], v[None])[0])(q, k, v)
    assert_close(mapped, attend_rows(q, k, v)[0])


class TestWithoutTheKernel:
    @pytest.mark.usefixtures("no_kernels")
    def test_one_warning_says_what_is_missing_and_how_to_get_it(self):
        q, k, v = random_qkv(dtype=torch.float32)
        with pytest.warns(UserWarning, match=r"not there .*pip install --force-reinstall --no-cache-dir"):
            attend(q, k, v)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            attend(q, k, v)

    @pytest.mark.usefixtures("no_kernels")
    @pytest.mark.filterwarnings("ignore:kvcache's native")
    @settings(max_examples=100)
    @given(case=cases())
    def test_every_option_over_every_storage_equals_the_reference(self, case):
        assert_equals_reference(case)


class TestCompiled:
    @staticmethod
    def compiled(function):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        return torch.compile(function, backend=counter, fullgraph=True), counter

    def test_one_operation_and_the_same_result(self):
        q, k, v = random_qkv(2, 8, 2, 1, 64, 32, dtype=torch.float32)
        lengths = torch.tensor([64, 13])
        function, counter = self.compiled(lambda q, k, v, lengths: attend(q, k, v, lengths=lengths, return_lse=True))
        (output, lse), (expected, expected_lse) = (
            call(q, k, v, lengths)
            for call in (function, lambda q, k, v, lengths: attend(q, k, v, lengths=lengths, return_lse=True))
        )
        assert torch.equal(output, expected)
        assert torch.equal(lse, expected_lse)
        names = [str(node.target) for node in counter.graphs[0].graph.nodes if node.op == "call_function"]
        assert sum("kvcache" in name for name in names) == (native.kernels is not None)

    def test_a_growing_length_compiles_at_most_twice(self):
        q, k, v = random_qkv(1, 8, 2, 1, 64, 32, dtype=torch.float32)
        function, counter = self.compiled(lambda q, k, v: attend(q, k, v))
        for length in range(2, 40):
            expected = attend(q, k[:, :, :length], v[:, :, :length])
            assert torch.allclose(function(q, k[:, :, :length], v[:, :, :length]), expected, atol=1e-6)
        assert counter.frame_count <= 2

    @needs_kernels
    def test_the_operation_passes_torchs_own_checks(self):
        q, k, v = random_qkv(2, 4, 2, 3, 20, 16, dtype=torch.float32)
        table = torch.tensor([[0], [1]])
        arguments = (q, k, v, 0, 0, 16, table, torch.tensor([20, 4]), None, 5, 1, 0.25, None, torch.zeros(4), True)
        torch.library.opcheck(torch.ops.kvcache.attend.default, arguments)
