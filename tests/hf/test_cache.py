"""The cache object by itself: what transformers calls on it, and how it is copied, saved, shown and refused."""

import copy
import gc
import inspect
import pickle
import types
import weakref

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LlamaModel, Qwen3NextConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING
from transformers.generation.utils import DeferredStopCheck
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from kvcache import CacheFullError, InvalidTypeError, InvalidValueError, RollbackError
from kvcache.hf import cache_for
from tests.hf.tiny_models import FAMILIES, VOCAB, bart, gemma3, gpt2, llama, mistral, t5

WINDOW = 5
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """On models this small a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def hybrid():
    """Sliding (window 5), sliding, full."""
    return gemma3(window=WINDOW)


@pytest.fixture(scope="module")
def models():
    return {name: make() for name, make in FAMILIES.items()}


def tagged(first, count, batch=2, dtype=torch.float64):
    """Keys (batch, 2, count, 4) that carry their position, and values (batch, 2, count, 3) that carry its negative."""
    positions = torch.arange(first, first + count, dtype=dtype)[None, None, :, None]
    rows = 1000 * torch.arange(batch, dtype=dtype)[:, None, None, None]
    heads = 100 * torch.arange(2, dtype=dtype)[None, :, None, None]
    tags = positions + rows + heads
    return tags.expand(-1, -1, -1, 4).clone(), -tags.expand(-1, -1, -1, 3).clone()


def fill(cache, count, batch=2, dtype=torch.float64):
    """Give every layer the next `count` tagged tokens and return what each layer gave back."""
    start = cache.get_seq_length()
    return [cache.update(*tagged(start, count, batch, dtype), index) for index in range(len(cache))]


def positions_of(k):
    return k[0, 0, :, 0].tolist()


def lengths(cache):
    return [layer.get_seq_length() for layer in cache.layers]


def ids_of(count, batch=1, seed=1):
    return torch.randint(3, VOCAB, (batch, count), generator=torch.Generator().manual_seed(seed))


# --- making one


def test_each_layer_gets_the_cache_of_its_kind(hybrid):
    cache = cache_for(hybrid)
    assert cache.is_sliding == [True, True, False]
    assert len(cache) == 3
    assert cache.is_croppable
    assert not cache.is_compileable
    assert not cache.is_initialized
    assert cache.get_seq_length() == 0
    assert cache.batch_size == -1
    assert cache.nbytes == 0


def test_c18_config_and_globals_are_unchanged_and_layer_counts_are_right():
    """C18: one dict for two models of 2 and 4 layers stays as it was; each cache has its own model's layers."""
    options = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    before = dict(options)
    mappings = dict(DYNAMIC_LAYER_TYPE_MAPPING), dict(STATIC_LAYER_TYPE_MAPPING)
    for layers in (2, 4):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **options))
        config = model.config.to_dict()
        cache = cache_for(model, max_tokens=8)
        model(torch.tensor([[1, 2, 3]]), cache=cache)
        assert lengths(cache) == [3] * layers
        assert model.config.to_dict() == config
    assert options == before
    assert mappings == (DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING)


@pytest.mark.parametrize("model", ["llama", None, torch.nn.Linear(2, 2)], ids=["str", "None", "Linear"])
def test_what_is_no_transformers_model_is_refused(model):
    with pytest.raises(InvalidTypeError, match=f"model is a {type(model).__name__}; expected a transformers model"):
        cache_for(model)


def test_a_model_without_generate_is_refused():
    config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(
        InvalidTypeError, match="model is a LlamaModel; expected a transformers model that can generate"
    ):
        cache_for(LlamaModel(config))


def test_unsupported_layer_kinds_are_refused_by_number_and_name():
    model = llama()
    model.config = Qwen3NextConfig(num_hidden_layers=4)
    before = set(model.__dict__)
    message = (
        "layer 0 of the model is of kind 'linear_attention'; expected full_attention or sliding_attention in every"
    )
    with pytest.raises(InvalidValueError, match=message):
        cache_for(model)
    model.config = LlamaConfig(num_hidden_layers=2)
    model.config.layer_types = ["full_attention", "chunked_attention"]
    model.config.attention_chunk_size = 4
    with pytest.raises(InvalidValueError, match="layer 1 of the model is of kind 'chunked_attention'"):
        cache_for(model)
    assert set(model.__dict__) == before


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_tokens": 0}, InvalidValueError, "max_tokens is 0; expected an integer >= 1"),
        ({"max_tokens": 2.5}, InvalidTypeError, r"max_tokens is a float \(2.5\); expected an integer >= 1"),
        ({"storage": "int3"}, InvalidValueError, "storage is 'int3'; expected one of float16"),
        ({"storage": torch.int8}, InvalidValueError, "storage is torch.int8; expected one of float16"),
    ],
)
def test_bad_options_are_refused(hybrid, options, error, message):
    with pytest.raises(error, match=message):
        cache_for(hybrid, **options)


@pytest.mark.parametrize(
    ("rope", "trained"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 16),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 8,
            },
            8,
        ),
    ],
    ids=["dynamic", "longrope"],
)
def test_a7_positions_that_change_with_the_length_are_announced(rope, trained, recwarn):
    """A7: rotary bases that change with the length give other results past the trained one, and the cache says so."""
    model = llama(rope_parameters={"rope_theta": 10000.0, **rope}, max_position_embeddings=16)
    with pytest.warns(UserWarning, match=f"change beyond {trained} tokens, but keys cached earlier keep the old ones"):
        cache_for(model)
    with pytest.warns(UserWarning, match=rf"cache_for\(model, max_tokens={trained}\) stops before"):
        cache_for(model, max_tokens=trained + 1)
    recwarn.clear()
    cache_for(model, max_tokens=trained)
    cache_for(llama())
    cache_for(gemma3())
    assert not recwarn.list


# --- update, mask sizes, room


@pytest.mark.parametrize("record", [False, True], ids=["", "recording"])
@pytest.mark.parametrize("query", [1, 2, 3, 4, 5])
def test_e10_update_returns_what_the_mask_sizes_promise(hybrid, record, query):
    """E10: in every state, recording or not, after a crop or not, as many rows as announced, from the offset on."""
    for stored in range(13):
        for dropped in range(min(stored, 3) + 1):
            cache = cache_for(hybrid)
            if record:
                cache.activate_past_recording()
            fill(cache, stored)
            if record or stored <= WINDOW:
                cache.crop(-dropped)
            n = cache.get_seq_length()
            promised = [cache.get_mask_sizes(query, index) for index in range(3)]
            returned = fill(cache, query)
            for (length, offset), (k, v) in zip(promised, returned, strict=True):
                assert positions_of(k) == list(range(offset, offset + length))
                assert positions_of(-v) == positions_of(k)
            assert promised[0] == (min(n, WINDOW - 1) + query, max(n - WINDOW + 1, 0))
            assert promised[2] == (n + query, 0)


OPERATIONS = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 9)),
    st.tuples(st.just("crop"), st.integers(0, 12)),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, 3), min_size=4, max_size=4)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("select"), st.lists(st.integers(0, 3), min_size=1, max_size=3)),
    st.sampled_from([("reset", None), ("record", None), ("stop", None), ("copy", None), ("pickle", None)]),
)


@pytest.mark.parametrize("max_tokens", [None, 30], ids=["growing", "preallocated"])
@settings(max_examples=150, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=14))
def test_any_sequence_of_operations_keeps_the_history(hybrid, max_tokens, operations):
    """Against a plain list of all tokens: what comes back, what can be dropped, and that a failure changes nothing."""
    cache = cache_for(hybrid, max_tokens)
    batch = 2
    history = torch.zeros(batch, 0, dtype=torch.float64)  # a tag for each row and token
    next_tag, cropped_at, recording = 1.0, 0, False
    longest = 0  # since it was empty
    for name, argument in operations:
        if name == "update":
            new = torch.arange(next_tag, next_tag + batch * argument, dtype=torch.float64).view(batch, argument)
            next_tag += batch * argument
            k = new[:, None, :, None].expand(-1, 2, -1, 4)
            if max_tokens is not None and history.shape[1] + argument > max_tokens:
                with pytest.raises(CacheFullError):
                    cache.update(k, -k, 0)
                continue
            n = history.shape[1]
            history = torch.cat([history, new], dim=1)
            longest = max(longest, history.shape[1])
            for index, first in enumerate([max(n - WINDOW + 1, 0)] * 2 + [0]):
                keys, values = cache.update(k, -k, index)
                torch.testing.assert_close(keys[:, 0, :, 0], history[:, first:], rtol=0, atol=0)
                torch.testing.assert_close(values, -keys, rtol=0, atol=0)
        elif name == "crop":
            keep = max(history.shape[1] - argument, 0)
            try:
                cache.crop(-argument)
            except RollbackError:
                assert not (recording and keep >= cropped_at)
                assert longest > WINDOW
            else:
                history, cropped_at = history[:, :keep], keep
        elif name == "reorder":
            rows = torch.tensor(argument)[:batch] % batch
            rows = torch.cat([rows, torch.zeros(batch - len(rows), dtype=torch.int64)])
            cache.reorder_cache(rows)
            history = history[rows] if cache.is_initialized else history
        elif name == "repeat" and batch <= 4 and cache.is_initialized:
            cache.batch_repeat_interleave(argument)
            history, batch = history.repeat_interleave(argument, dim=0), batch * argument
        elif name == "select" and cache.is_initialized:
            rows = torch.tensor(argument) % batch
            cache.batch_select_indices(rows)
            history, batch = history[rows], len(rows)
        elif name == "reset":
            cache.reset()
            history, recording = history[:, :0], False
        elif name == "record":
            cropped_at = cropped_at if recording else history.shape[1]
            recording = True
            cache.activate_past_recording()
        elif name == "stop":
            recording = False
            for layer in cache.layers[:2]:
                layer.record_past = False
        elif name == "copy":
            cache = copy.deepcopy(cache)
        elif name == "pickle":
            cache = pickle.loads(pickle.dumps(cache))
        longest = longest if history.shape[1] else 0
        assert lengths(cache) == [history.shape[1]] * 3


@pytest.mark.parametrize("record", [False, True], ids=["", "recording"])
def test_agrees_with_transformers_own_cache(hybrid, record):
    ours, theirs = cache_for(hybrid), DynamicCache(config=hybrid.config)
    if record:
        ours.activate_past_recording()
        theirs.activate_past_recording()
    for step in (3, 1, 1, 7, 1, 2, 4, 1):
        for index in range(3):
            assert ours.get_mask_sizes(step, index) == theirs.get_mask_sizes(step, index)
        for mine, other in zip(fill(ours, step), fill(theirs, step), strict=True):
            assert torch.equal(mine[0], other[0])
            assert torch.equal(mine[1], other[1])
        if record:
            ours.crop(-(step // 2))
            theirs.crop(-(step // 2))
        assert lengths(ours) == lengths(theirs)
        assert ours.get_seq_length() == theirs.get_seq_length()


def test_a5_and_d9_lengths_are_plain_ints_and_snapshots(hybrid):
    """A5, D9: a length is an int in every layer and every cache, and later updates do not change one handed out."""
    for cache in (cache_for(hybrid), cache_for(hybrid, 20), cache_for(t5())):
        own = getattr(cache, "self_attention_cache", cache)
        before = own.get_seq_length(), own.get_mask_sizes(1, 0)
        fill(own, 7)
        assert before == (0, (1, 0))
        for value in (cache.get_seq_length(), *lengths(own), *own.get_mask_sizes(2, 0), cache.get_max_length()):
            assert type(value) is int
        assert cache.get_seq_length() == 7


@pytest.mark.parametrize("stored", [5, 6], ids=["N-1", "N"])
def test_c1_a_full_cache_says_so_before_any_layer_is_written(hybrid, stored):
    """C1: capacity 6; one token too many is refused at the first layer, a sliding one, and nothing has changed."""
    cache = cache_for(hybrid, max_tokens=6)
    fill(cache, stored)
    rows = [layer.keys for layer in cache.layers]
    new = 7 - stored
    message = (
        f"the cache is full: {stored} of 6 tokens stored, {new} more asked for; "
        r"create it with cache_for\(model, max_tokens=7\) or more"
    )
    with pytest.raises(CacheFullError, match=message):
        cache.update(*tagged(stored, new), 0)
    assert lengths(cache) == [stored] * 3
    assert all(torch.equal(old, layer.keys) for old, layer in zip(rows, cache.layers, strict=True))
    fill(cache, 6 - stored)
    assert lengths(cache) == [6] * 3


def test_preallocated_buffers_have_exactly_the_size_asked_for(hybrid):
    cache = cache_for(hybrid, max_tokens=12)
    fill(cache, 3)
    assert [layer.rows.k_cache.shape[2] for layer in cache.layers] == [WINDOW, WINDOW, 12]
    assert cache.nbytes == 2 * 2 * (4 + 3) * (5 + 5 + 12) * 8
    assert (cache.get_max_length(), cache.get_max_length(0)) == (12, WINDOW)
    small = cache_for(hybrid, max_tokens=3)
    fill(small, 3)
    assert [layer.rows.k_cache.shape[2] for layer in small.layers] == [3, 3, 3]


def test_a_growing_cache_has_no_limit_and_doubles(hybrid):
    cache = cache_for(hybrid)
    assert cache.get_max_length(2) == -1
    sizes = []
    for _ in range(20):
        fill(cache, 1)
        sizes.append([layer.rows.k_cache.shape[2] for layer in cache.layers])
    assert [size[2] for size in sizes] == [1, 2, 4, 4, 8, 8, 8, 8] + [16] * 8 + [32] * 4
    assert [size[0] for size in sizes] == [1, 2, 4, 4] + [WINDOW] * 16
    fill(cache, 100)
    assert cache.layers[2].rows.k_cache.shape[2] == 120


class CountingMode(TorchDispatchMode):
    """Counts the bytes of new storage, and those written by copy_."""

    def __init__(self):
        super().__init__()
        self.allocated = self.copied = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self.copied += result.nbytes
        elif isinstance(result, torch.Tensor) and not func._schema.returns[0].alias_info:
            self.allocated += result.nbytes
        return result


@pytest.mark.parametrize("max_tokens", [520, None], ids=["preallocated", "growing"])
def test_c12_bytes_copied_and_allocated_over_512_steps(max_tokens):
    """C12: preallocated, a step allocates nothing and writes its own rows; growing, all copies together are linear."""
    cache = cache_for(llama(num_hidden_layers=1), max_tokens)
    fill(cache, 8, batch=1)
    k, v = tagged(8, 1, batch=1)
    row = k.nbytes + v.nbytes
    with CountingMode() as count:
        per_step = []
        for _ in range(512):
            before = count.allocated, count.copied
            cache.update(k, v, 0)
            per_step.append((count.allocated - before[0], count.copied - before[1]))
    if max_tokens is not None:
        assert set(per_step) == {(0, row)}
    else:
        grown = [step for step in per_step if step != (0, row)]
        assert len(grown) == 7  # 8 -> 16 -> ... -> 1024
        assert count.copied - 512 * row < 2 * 520 * row
        assert count.allocated < 4 * 520 * row
        assert cache.nbytes < 2 * 520 * row


def test_c12_a_window_in_use_allocates_no_more_as_it_goes(hybrid):
    cache = cache_for(hybrid)
    fill(cache, 20)
    sizes = set()
    for _ in range(64):
        fill(cache, 1)
        sizes.add(sum(layer.rows.nbytes for layer in cache.layers[:2]))
    assert len(sizes) == 1


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("narrow", ["keys", "values"])
def test_c9_the_wider_dtype_comes_out_and_everything_is_cast_to_it(hybrid, narrow, autocast):
    """C9: keys in float32 and values in bfloat16, or the reverse, give one documented dtype, whatever comes later."""
    cache = cache_for(hybrid)
    k, v = tagged(0, 3, dtype=torch.float32)
    first = (k.bfloat16(), v) if narrow == "keys" else (k, v.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for index in range(3):
            cache.update(*first, index)
            keys, values = cache.update(k.bfloat16(), v.double(), index)
            assert (keys.dtype, values.dtype) == (torch.float32, torch.float32)
            assert torch.equal(keys[:, :, -3:], k.bfloat16().float())
            assert torch.equal(values[:, :, -3:], v)


def test_rows_kept_in_another_dtype_come_out_in_the_models(hybrid):
    cache = cache_for(hybrid, storage="bfloat16")
    k = torch.full((1, 2, 3, 4), 1 + 2**-12, dtype=torch.float64)
    for index in range(3):
        keys, _ = cache.update(k, k, index)
        assert keys.dtype == torch.float64
        assert torch.equal(keys, torch.ones_like(k))
        assert cache.layers[index].keys.dtype == torch.float64
        assert cache.layers[index].rows.k_cache.dtype == torch.bfloat16


@pytest.mark.parametrize("stored", [0, 4, 12])
def test_k1_no_tokens_change_nothing(hybrid, stored):
    """K1: an update of length 0 is allowed and changes nothing."""
    cache = cache_for(hybrid)
    fill(cache, stored)
    before = [layer.keys for layer in cache.layers]
    fill(cache, 0)
    assert lengths(cache) == [stored] * 3
    for old, layer in zip(before, cache.layers, strict=True):
        assert layer.keys is old is None or torch.equal(old, layer.keys)


def test_a_failed_first_update_leaves_the_layer_unwritten(hybrid):
    cache = cache_for(hybrid)
    k, v = tagged(0, 3)
    with pytest.raises(InvalidValueError, match=r"v_new has shape \(2, 1, 3, 3\)"):
        cache.update(k, v[:, :1], 2)
    assert not cache.layers[2].is_initialized
    fill(cache, 3, batch=5)
    assert cache.batch_size == 5


def test_another_batch_size_is_refused_until_reset(hybrid):
    cache = cache_for(hybrid)
    fill(cache, 6, batch=2)
    with pytest.raises(InvalidValueError, match=r"the cache holds 2 sequences, the input has 3; reset\(\) the cache"):
        fill(cache, 1, batch=3)
    assert lengths(cache) == [6] * 3
    cache.reset()
    fill(cache, 4, batch=3)
    assert cache.batch_size == 3


def test_early_initialization_allocates_without_tokens(hybrid):
    cache = cache_for(hybrid, max_tokens=9)
    cache.early_initialization(2, 2, 4, torch.float32, torch.device("cpu"))
    assert cache.is_initialized
    assert lengths(cache) == [0] * 3
    assert cache.nbytes == 2 * 2 * 8 * (5 + 5 + 9) * 4
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4


# --- reading, copying, saving, showing


def test_keys_and_values_are_the_valid_rows_and_read_only(hybrid):
    cache = cache_for(hybrid, max_tokens=16)
    assert cache.layers[0].keys is None
    assert cache.layers[2].values is None
    fill(cache, 7)
    assert positions_of(cache.layers[0].keys) == [2, 3, 4, 5, 6]
    assert positions_of(cache.layers[2].keys) == [0, 1, 2, 3, 4, 5, 6]
    assert positions_of(-cache.layers[2].values) == [0, 1, 2, 3, 4, 5, 6]
    assert cache.layers[2].keys.data_ptr() == cache.layers[2].rows.k_cache.data_ptr()
    with pytest.raises(AttributeError):
        cache.layers[2].keys = torch.zeros(1)
    cache.crop(-9)
    assert cache.layers[2].keys is None


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("max_tokens", [None, 20], ids=["growing", "preallocated"])
def test_copies_share_no_buffers(hybrid, duplicate, max_tokens):
    cache = cache_for(hybrid, max_tokens)
    cache.activate_past_recording()
    fill(cache, 8)
    twin = duplicate(cache)
    for mine, other in zip(cache.layers, twin.layers, strict=True):
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.values, other.values)
        for name in ("k_cache", "v_cache"):
            assert getattr(mine.rows, name).data_ptr() != getattr(other.rows, name).data_ptr()
    cache.crop(-3)
    fill(cache, 1)
    assert lengths(twin) == [8] * 3
    assert positions_of(twin.layers[0].keys)[-5:] == [3, 4, 5, 6, 7]
    twin.crop(-5)  # the copy records too
    assert lengths(twin) == [3] * 3
    assert twin.layers[2].max_tokens == max_tokens


def test_a_copied_encoder_decoder_cache_is_independent():
    model = t5()
    cache = cache_for(model)
    with torch.no_grad():
        model(input_ids=ids_of(5), decoder_input_ids=ids_of(3), cache=cache)
    for twin in (copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert twin.is_updated == {0: True, 1: True}
        twin.crop(-2)
        assert (cache.get_seq_length(), twin.get_seq_length()) == (3, 1)
        assert (
            twin.cross_attention_cache.layers[0].keys.data_ptr()
            != cache.cross_attention_cache.layers[0].keys.data_ptr()
        )


def test_a_cache_made_in_inference_mode_works_outside(models):
    for model in models.values():
        ids = ids_of(12)
        with torch.inference_mode():
            cache = cache_for(model)
            model(ids[:, :7], cache=cache)
            cache.crop(-1)
        twin = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
        expected = model(ids, use_cache=False).logits[:, 6:]
        for each in (cache, twin):
            logits = model(ids[:, 6:], cache=each).logits
            torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
            each.reorder_cache(torch.tensor([0]))
            each.batch_repeat_interleave(2)
            each.reset()


def test_gradients_flow_through_the_step_but_not_through_the_past(models):
    """Gradients of a step are those of a run whose earlier keys and values are constants; copying afterwards works."""
    for model in models.values():
        ids = ids_of(9)
        grads = []
        for cache in (cache_for(model), DynamicCache(config=model.config)):
            model.zero_grad()
            with torch.no_grad():
                model(ids[:, :6], cache=cache)
            model(ids[:, 6:], cache=cache).logits.sum().backward()
            grads.append([p.grad.clone() for p in model.parameters()])
            if not isinstance(cache, DynamicCache):
                assert copy.deepcopy(cache).get_seq_length() == 9
        for mine, other in zip(*grads, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)
        model.zero_grad()


def test_repr_says_what_matters_in_one_line(hybrid):
    cache = cache_for(hybrid, max_tokens=40)
    fill(cache, 7)
    assert repr(cache) == (
        f"ModelCache(2 sliding (window 5) + 1 full layers, max_tokens=40, batch_size=2, seq_len=7, "
        f"nbytes={2 * 2 * 7 * 50 * 8})"
    )
    assert repr(cache_for(llama(num_hidden_layers=30))) == (
        "ModelCache(30 full layers, max_tokens=None, batch_size=-1, seq_len=0, nbytes=0)"
    )
    assert repr(cache_for(bart())).startswith("EncoderDecoderModelCache(self_attention_cache=ModelCache(3 full layers")


# --- crop, recording, reset, rows of the batch


@pytest.mark.parametrize(("removed", "left"), [(-1, 3), (-4, 0), (-6, 0), (0, 4)])
@pytest.mark.parametrize("record", [False, True], ids=["", "recording"])
def test_d3_crop_counts_from_the_end(hybrid, removed, left, record):
    """D3: on 4 tokens, -1, -4, -6 and 0 leave 3, 0, 0 and 4 in every layer, and what comes next is right."""
    cache = cache_for(hybrid)
    if record:
        cache.activate_past_recording()
    fill(cache, 4)
    cache.crop(removed)
    assert lengths(cache) == [left] * 3
    for k, _ in fill(cache, 2):
        assert positions_of(k) == list(range(left + 2))


@pytest.mark.parametrize("removed", [2, 9])
def test_d3_positive_counts_are_refused(hybrid, removed):
    """D3: transformers' crop takes no absolute length."""
    cache = cache_for(hybrid)
    fill(cache, 4)
    with pytest.raises(ValueError, match=f"tokens_to_remove is {removed}; expected 0 or less"):
        cache.crop(removed)
    assert lengths(cache) == [4] * 3


def test_crop_on_an_empty_cache_does_nothing(hybrid):
    cache = cache_for(hybrid)
    for removed in (0, -3):
        cache.crop(removed)
    assert lengths(cache) == [0] * 3


def test_a_wrapped_window_that_cannot_go_back_changes_no_layer():
    model = gemma3(window=WINDOW, layer_types=["full_attention", "full_attention", "sliding_attention"])
    cache = cache_for(model)
    fill(cache, 12)
    message = r"layer 2 has seen 12 tokens .* without the last 3; call activate_past_recording\(\) before"
    with pytest.raises(RollbackError, match=message):
        cache.crop(-3)
    assert lengths(cache) == [12] * 3
    assert [positions_of(k)[0] for k, _ in fill(cache, 1)] == [0, 0, 8]


def test_recording_keeps_everything_since_the_last_crop(hybrid):
    cache = cache_for(hybrid)
    fill(cache, 9)
    cache.activate_past_recording()
    for rounds, dropped in enumerate((0, 20, 7, 1)):
        for _ in range(4):
            fill(cache, 5)
            cache.activate_past_recording()  # it records already
        assert lengths(cache) == [9 + 20 * (rounds + 1) - sum((0, 20, 7, 1)[:rounds])] * 3
        cache.crop(-dropped)
        n = cache.get_seq_length()
        assert [positions_of(layer.keys)[-WINDOW + 1 :] for layer in cache.layers] == [[n - 4, n - 3, n - 2, n - 1]] * 3
    with pytest.raises(RollbackError):
        cache.crop(-2)


def test_recording_memory_grows_in_doublings_and_is_given_back_at_the_crop(hybrid):
    cache = cache_for(hybrid)
    cache.activate_past_recording()
    fill(cache, 400)
    window = cache.layers[0]
    assert window.rows.k_cache.shape[2] == 400
    cache.crop(-3)
    assert window.rows.k_cache.shape[2] == WINDOW
    assert lengths(cache) == [397] * 3
    slacks = set()
    for _ in range(100):
        fill(cache, 1)
        slacks.add(window.rows.slack)
    assert slacks == {0, 1, 2, 4, 8, 16, 32, 64, 128}
    cache.crop(-100)
    assert lengths(cache) == [397] * 3
    for _ in range(20):  # rounds of four drafts: the slack that they need stays
        fill(cache, 5)
        cache.crop(-2)
    assert window.rows.slack == 4


def test_the_end_of_deferred_stopping_switches_recording_off(hybrid):
    cache = cache_for(hybrid)
    fill(cache, 9)
    check = DeferredStopCheck(torch.ones(2, 9, dtype=torch.int64), 50, cache, cache_is_returned=True)
    check.slots.clear()  # its events are those of a device
    fill(cache, 3)
    check.stop_reported = True
    assert check.finish() == 1
    assert lengths(cache) == [11] * 3
    assert not any(cache.is_recording_past(index) for index in range(3))
    before = cache.layers[0].rows.nbytes
    fill(cache, 300)
    assert cache.layers[0].rows.nbytes == before


def test_c6_reset_equals_a_new_cache(hybrid):
    """C6: run A, reset, run B; length 0 in every layer, nothing of A left, and another batch size is fine."""
    cache = cache_for(hybrid)
    cache.activate_past_recording()
    fill(cache, 12)
    old = weakref.ref(cache.layers[2].rows.k_cache)
    cache.reset()
    gc.collect()
    assert lengths(cache) == [0] * 3
    assert old() is None
    assert not cache.is_recording_past(0)
    new = cache_for(hybrid)
    for mine, other in zip(fill(cache, 9, batch=3), fill(new, 9, batch=3), strict=True):
        assert torch.equal(mine[0], other[0])
        assert torch.equal(mine[1], other[1])


def test_c6_reset_when_some_layers_were_never_written(hybrid):
    """C6: an interrupted forward leaves layers unequal; reset makes them all empty."""
    cache = cache_for(hybrid)
    cache.update(*tagged(0, 4), 0)
    assert lengths(cache) == [4, 0, 0]
    cache.reset()
    assert lengths(cache) == [0] * 3
    fill(cache, 2)
    assert lengths(cache) == [2] * 3


@pytest.mark.parametrize("max_tokens", [None, 20], ids=["growing", "preallocated"])
@pytest.mark.parametrize("stored", [3, 12])
def test_d1_keys_stay_keys_and_values_stay_values(hybrid, max_tokens, stored):
    """D1: K = 1 and V = 2 through repeat, select and reorder stay 1 and 2."""
    cache = cache_for(hybrid, max_tokens)
    ones = torch.ones(2, 2, stored, 4)
    for index in range(3):
        cache.update(ones, 2 * ones, index)
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([5, 0, 1, 1, 2, 4]))
    cache.batch_select_indices(torch.tensor([0, 3, 5]))
    assert cache.batch_size == 3
    for layer in cache.layers:
        assert torch.equal(layer.keys, torch.ones_like(layer.keys))
        assert torch.equal(layer.values, torch.full_like(layer.values, 2))


def test_rows_of_the_batch_follow_their_index(hybrid):
    cache = cache_for(hybrid)
    cache.reorder_cache(torch.tensor([0, 1]))  # nothing to do yet
    fill(cache, 12, batch=2)
    cache.batch_repeat_interleave(2)
    assert [layer.keys[:, 0, 0, 0].tolist() for layer in cache.layers][2] == [0, 0, 1000, 1000]
    cache.reorder_cache(torch.tensor([3, 1, 2, 0]))
    assert cache.layers[0].keys[:, 0, -1, 0].tolist() == [1011, 11, 1011, 11]
    cache.batch_select_indices(torch.tensor([1, 0]))
    assert cache.layers[0].keys[:, 0, -1, 0].tolist() == [11, 1011]
    assert cache.layers[2].keys[:, 0, 0, 0].tolist() == [0, 1000]
    with pytest.raises(InvalidValueError, match=r"index holds 2; expected rows in \[0, 2\)"):
        cache.reorder_cache(torch.tensor([0, 2]))
    assert cache.layers[0].keys[:, 0, -1, 0].tolist() == [11, 1011]


def test_d8_rows_of_an_encoder_decoder_cache_follow_the_beams():
    """D8: 2 samples as rows [0, 0, 1], reordered to [0, 1, 1]: own and cross rows go with the index."""
    cache = cache_for(bart())
    for part, count in ((cache.self_attention_cache, 3), (cache.cross_attention_cache, 5)):
        fill(part, count, batch=2)
        part.batch_select_indices(torch.tensor([0, 0, 1]))
    cache.reorder_cache(torch.tensor([0, 2, 2]))
    for part in (cache.self_attention_cache, cache.cross_attention_cache):
        for layer in part.layers:
            assert layer.keys[:, 0, 0, 0].tolist() == [0, 1000, 1000]
    assert (cache.batch_size, cache.get_seq_length(), cache.is_croppable) == (3, 3, True)
    assert cache.nbytes == cache.self_attention_cache.nbytes + cache.cross_attention_cache.nbytes
    cache.crop(-2)
    assert lengths(cache.self_attention_cache) == [1] * 3
    assert lengths(cache.cross_attention_cache) == [5] * 3
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 5]))
    cache.reset()
    assert lengths(cache.cross_attention_cache) == [0] * 3
    assert not any(cache.is_updated.values())


# --- what the model's attention makes of it


def attention_over(cache, config, k, v, mask=None, window=False, layer=0):
    """Return transformers' own SDPA attention (B, T, H, D) of zero queries over the cache, with its own masks."""
    batch, _, count, dim = k.shape
    embeds = torch.zeros(batch, count, config.hidden_size)
    make = create_sliding_window_causal_mask if window else create_causal_mask
    attention_mask = make(config=config, inputs_embeds=embeds, attention_mask=mask, cache=cache, position_ids=None)
    keys, values = cache.update(k, v, layer)
    queries = torch.zeros(batch, config.num_attention_heads, count, dim)
    module = types.SimpleNamespace(
        num_key_value_groups=config.num_attention_heads // k.shape[1], is_causal=True, training=False
    )
    return sdpa_attention_forward(module, queries, keys, values, attention_mask)[0]


def numbers(first, last, batch=1, heads=2):
    """K = 0 and V = the number of the token: attention gives the mean of the numbers that a query sees."""
    v = torch.arange(first, last + 1.0)[None, None, :, None].expand(batch, heads, -1, 8)
    return torch.zeros_like(v), v


def test_b1_a_query_sees_all_cached_keys():
    """B1: over 4 keys one query gives 2.5 and two give [2.0, 2.5], as in one pass over all."""
    model = llama()
    for cached, expected in ((3, [2.5]), (2, [2.0, 2.5]), (0, [1.0, 1.5, 2.0, 2.5])):
        cache = cache_for(model)
        if cached:
            attention_over(cache, model.config, *numbers(1, cached))
        assert attention_over(cache, model.config, *numbers(cached + 1, 4))[0, :, 0, 0].tolist() == expected


def test_b1_through_a_window():
    """B1 with a window of 4 and 7 tokens, as 7, 4 + 3 and one by one: [1, 1.5, 2, 2.5, 3.5, 4.5, 5.5]."""
    model = mistral(window=4)
    for sizes in ((7,), (4, 3), (1,) * 7):
        cache, seen = cache_for(model), []
        for size in sizes:
            rows = numbers(len(seen) + 1, len(seen) + size)
            seen += attention_over(cache, model.config, *rows, window=True)[0, :, 0, 0].tolist()
        assert seen == pytest.approx([1, 1.5, 2, 2.5, 3.5, 4.5, 5.5])


def test_b16_padded_keys_get_no_weight_whatever_they_hold():
    """B16: rows that start at 2 and 0, one query at a time: the mean is over the row's own tokens only."""
    model = llama()
    cache = cache_for(model)
    k, v = numbers(1, 3, batch=2)
    v = v.clone()
    v[0, :, :2] = 1e30
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    attention_over(cache, model.config, k, v, mask=mask)
    for last in (4, 5):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], dim=1)
        means = attention_over(cache, model.config, *numbers(last, last, batch=2), mask=mask)[:, 0, 0, 0].tolist()
        assert means == [(3 + last) / 2, (1 + last) / 2]


def test_b10_query_heads_read_their_own_key_value_head():
    """B10: 4 query heads over 2 key/value heads of V = 10 and 20 give 10, 10, 20, 20."""
    model = llama()
    cache = cache_for(model)
    for count in (3, 1):
        v = torch.tensor([10.0, 20.0])[None, :, None, None].expand(1, 2, count, 8)
        output = attention_over(cache, model.config, torch.zeros_like(v), v)
    assert output[0, 0, :, 0].tolist() == [10, 10, 20, 20]


def test_a3_a_new_token_is_rotated_by_its_own_position(models):
    """A3: after a prefill of 5, decoding one token uses row 5 of the position table."""
    ids = ids_of(6)
    for name, model in models.items():
        seen = []
        inner = model.transformer.wpe if name == "gpt2" else model.model.rotary_emb

        def look(module, args, kwargs, seen=seen):
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            seen.append([value.tolist() for value in given if not value.is_floating_point()])

        hook = inner.register_forward_pre_hook(look, with_kwargs=True)
        cache = cache_for(model)
        with torch.no_grad():
            model(ids[:, :5], cache=cache)
            seen.clear()
            logits = model(ids[:, 5:], cache=cache).logits
            assert seen in ([[[[5]]]], [[[[5]]]] * 2)  # once for each kind of layer
            expected = model(ids, use_cache=False).logits[:, 5:]
        hook.remove()
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)


# --- the guard


def attributes(model):
    return dict(model.__dict__), list(model._forward_pre_hooks), list(model._forward_pre_hooks_with_kwargs)


@pytest.mark.parametrize("make", [gemma3, gpt2, t5])
def test_the_model_is_left_as_it_was_when_its_last_cache_is_gone(make):
    model = make()
    before = attributes(model)
    first, second = cache_for(model), cache_for(model)
    twin = copy.deepcopy(first)
    assert len(model._forward_pre_hooks) == 1
    del first, second
    gc.collect()
    assert "prepare_inputs_for_generation" in model.__dict__
    again = cache_for(model)
    assert len(model._forward_pre_hooks) == 1
    del twin, again
    gc.collect()
    after = attributes(model)
    assert after == before
    assert all(after[0][name] is value for name, value in before[0].items())


def test_a_used_cache_lets_go_of_the_model_too():
    model = llama()
    before = attributes(model)
    model.generate(ids_of(4), max_new_tokens=3, cache=cache_for(model))
    gc.collect()
    assert attributes(model) == before


def test_a_cache_does_not_keep_its_model_alive():
    model = llama()
    cache = cache_for(model)
    alive = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()
    del cache


def test_an_instance_that_had_its_own_method_gets_it_back():
    """As PEFT does: an attribute of that name on the instance is called while guarded, and restored."""
    model = llama()
    calls = []

    def own(input_ids, **kwargs):
        calls.append(kwargs["next_sequence_length"])
        return LlamaForCausalLM.prepare_inputs_for_generation(model, input_ids, **kwargs)

    model.prepare_inputs_for_generation = own
    cache = cache_for(model)
    model.generate(ids_of(5), max_new_tokens=2, cache=cache)
    assert calls == [5, 1]
    del cache
    gc.collect()
    assert model.__dict__["prepare_inputs_for_generation"] is own


def test_what_was_put_over_the_guard_stays():
    model = llama()
    cache = cache_for(model)
    guarded = model.prepare_inputs_for_generation

    def over(*args, **kwargs):
        return guarded(*args, **kwargs)

    model.prepare_inputs_for_generation = over
    del cache
    gc.collect()
    assert model.__dict__["prepare_inputs_for_generation"] is over
    assert model.generate(ids_of(5), max_new_tokens=2).shape == (1, 7)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_or_saved_model_is_a_model_of_its_own(duplicate):
    model = llama()
    cache = cache_for(model)
    twin = duplicate(model)
    assert twin.prepare_inputs_for_generation.__self__ is twin
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    ids = ids_of(5)
    assert twin.generate(ids, max_new_tokens=3, cache=cache_for(twin)).tolist() == [[*ids[0].tolist(), 0, 0, 0]]
    assert torch.equal(model.generate(ids, max_new_tokens=3, cache=cache), llama().generate(ids, max_new_tokens=3))


def test_generate_still_knows_which_arguments_the_model_takes():
    model = llama()
    signature = inspect.signature(model.prepare_inputs_for_generation)
    cache = cache_for(model)
    assert inspect.signature(model.prepare_inputs_for_generation) == signature
    with pytest.raises(ValueError, match="typo"):
        model.generate(ids_of(5), max_new_tokens=2, cache=cache, typo=1)


@every_family
@pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")
def test_a11_a_mask_of_the_wrong_length_is_refused(models, family):
    """A11: cache of 6, one new id and a mask of 6 is an error that names all three; a mask of 7 is right."""
    model, ids = models[family], ids_of(7)
    with torch.no_grad():
        for argument in ("cache", "past_key_values"):
            cache = cache_for(model)
            model(ids[:, :6], cache=cache)
            message = "attention_mask covers 6 tokens; expected 7: 6 in the cache and 1 new ones"
            for mask in (torch.ones(1, 6), torch.tensor([[0, 1, 1, 1, 1, 1]])):
                with pytest.raises(InvalidValueError, match=message):
                    model(ids[:, 6:], attention_mask=mask, **{argument: cache})
            with pytest.raises(InvalidValueError, match=message):
                model(ids[:, 6:], mask, cache=cache) if family != "gpt2" else model(ids[:, 6:], cache, mask)
            assert lengths(cache) == [6] * len(cache)
            logits = model(ids[:, 6:], attention_mask=torch.ones(1, 7), **{argument: cache}).logits
            torch.testing.assert_close(logits, model(ids, use_cache=False).logits[:, 6:], rtol=1e-12, atol=1e-12)


def test_a11_embeddings_are_counted_as_ids_are(hybrid):
    cache = cache_for(hybrid)
    embeds = hybrid.get_input_embeddings()(ids_of(6)).detach()
    with torch.no_grad():
        hybrid(inputs_embeds=embeds, attention_mask=torch.ones(1, 6), cache=cache)
        with pytest.raises(InvalidValueError, match="covers 6 tokens; expected 12: 6 in the cache and 6 new ones"):
            hybrid(inputs_embeds=embeds, attention_mask=torch.ones(1, 6), cache=cache)


def test_a11_in_an_encoder_decoder_it_is_the_decoders_mask():
    model = bart()
    cache = cache_for(model)
    with torch.no_grad():
        model(input_ids=ids_of(5), attention_mask=torch.ones(1, 5), decoder_input_ids=ids_of(3), cache=cache)
        with pytest.raises(InvalidValueError, match="decoder_attention_mask covers 3 tokens; expected 4"):
            model(
                input_ids=ids_of(5),
                attention_mask=torch.ones(1, 5),
                decoder_input_ids=ids_of(1),
                decoder_attention_mask=torch.ones(1, 3),
                cache=cache,
            )


def test_other_caches_are_none_of_the_guards_business(hybrid):
    cache, other = cache_for(hybrid), DynamicCache(config=hybrid.config)
    ids = ids_of(5)
    with torch.no_grad():
        hybrid(ids, cache=other)
        hybrid(ids[:, :1], attention_mask=torch.ones(1, 6), cache=other)
        hybrid(ids, attention_mask=torch.ones(1, 5), use_cache=False)
    assert other.get_seq_length() == 6
    assert cache.get_seq_length() == 0


def test_an_interrupted_forward_is_noticed(hybrid):
    cache = cache_for(hybrid)
    ids = ids_of(8)

    def interrupt(*_):
        raise KeyboardInterrupt

    with torch.no_grad():
        hybrid(ids[:, :4], cache=cache)
        hook = hybrid.model.layers[2].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            hybrid(ids[:, 4:6], cache=cache)
        hook.remove()
        with pytest.raises(
            InvalidValueError, match=r"hold between 4 and 6 tokens, .* interrupted; reset\(\) the cache"
        ):
            hybrid(ids[:, 4:6], cache=cache)
        cache.reset()
        assert hybrid(ids, cache=cache).logits.shape[1] == 8


def test_known_tokens_follow_every_operation(models):
    model = models["llama"]
    ids = ids_of(6, batch=2)
    cache = cache_for(model)
    assert cache.known_tokens() is None
    with torch.no_grad():
        model(ids[:, :4], cache=cache)
        model(ids[:, 4:], cache=cache)
        assert torch.equal(cache.known_tokens(), ids)
        cache.crop(-3)
        model(ids[:, 5:], cache=cache)
        assert torch.equal(cache.known_tokens(), ids[:, [0, 1, 2, 5]])
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
        cache.batch_select_indices(torch.tensor([0, 1]))
        assert torch.equal(copy.deepcopy(cache).known_tokens(), ids[[1, 0]][:, [0, 1, 2, 5]])
        model(inputs_embeds=model.get_input_embeddings()(ids), cache=cache)
        model(ids, cache=cache)
        assert cache.known_tokens() is None
        cache.reset()
        model.model(ids, cache=cache)  # the guard watches the whole model only
        assert cache.known_tokens() is None
