"""What layers and models keep of a token, and which arguments are refused."""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

from kvcache import CacheSpec, InvalidTypeError, InvalidValueError, LayerSpec

FULL = LayerSpec(num_heads=3, head_dim=64)
WINDOW = LayerSpec(num_heads=2, head_dim=33, v_head_dim=16, window=5, sinks=1)


@pytest.mark.parametrize(
    ("storage", "k_row", "v_row"),
    [
        ("float64", 64 * 8, 33 * 8),
        ("float32", 64 * 4, 33 * 4),
        ("bfloat16", 64 * 2, 33 * 2),
        ("float16", 64 * 2, 33 * 2),
        (torch.float16, 64 * 2, 33 * 2),
        ("int8", 8 + 64, 8 + 33),
        ("int4", 8 + 32, 8 + 17),
        ("int8/int4", 8 + 64, 8 + 17),
        (("float32", "int4"), 64 * 4, 8 + 17),
        ((torch.float32, torch.bfloat16), 64 * 4, 33 * 2),
    ],
)
def test_bytes_of_a_token_are_those_of_its_rows(storage, k_row, v_row):
    layer = LayerSpec(num_heads=3, head_dim=64, v_head_dim=33)
    assert layer.token_nbytes(storage) == 3 * (k_row + v_row)
    spec = CacheSpec([layer, LayerSpec(num_heads=3, head_dim=64, v_head_dim=33, window=7), layer])
    assert spec.token_nbytes(storage) == 3 * layer.token_nbytes(storage)
    assert spec.token_nbytes(storage, "full") == 2 * layer.token_nbytes(storage)
    assert spec.token_nbytes(storage, "sliding") == layer.token_nbytes(storage)


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda spec: spec.token_nbytes("float32", "slding"), InvalidValueError, "kind is 'slding'; expected one of"),
        (lambda spec: spec.nbytes({"full": 3}, 4, "int8"), InvalidValueError, r"num_blocks has the kinds \['full'\]"),
        (
            lambda spec: spec.nbytes({"full": 3, "sliding": 0}, 4, "int8"),
            InvalidValueError,
            r"num_blocks\['sliding'\] is 0",
        ),
        (lambda spec: spec.nbytes(-3, 4, "int8"), InvalidValueError, "num_blocks is -3; expected an integer >= 1"),
        (lambda spec: spec.nbytes(3, 2.5, "int8"), InvalidTypeError, "block_size is a float"),
        (lambda spec: spec.nbytes(3, 4, "int9"), InvalidValueError, "storage is 'int9'"),
    ],
)
def test_bytes_of_what_cannot_be_are_refused(act, error, message):
    with pytest.raises(error, match=f"^{message}"):
        act(CacheSpec([FULL, WINDOW]))


def test_sizes_are_plain_ints_whatever_integers_came():
    layer = LayerSpec(np.int64(3), np.int64(64), window=np.int64(5), sinks=np.int64(1))
    assert [type(size) for size in (layer.num_heads, *layer.head_dims, layer.window, layer.sinks)] == [int] * 5
    assert type(layer.token_nbytes("int8")) is int


@pytest.mark.parametrize(("storage", "error"), [("int3", InvalidValueError), (4, InvalidTypeError)])
def test_bytes_of_an_unknown_storage_are_refused(storage, error):
    with pytest.raises(error, match=r"^storage is "):
        FULL.token_nbytes(storage)
    with pytest.raises(error, match=r"^storage is "):
        CacheSpec([FULL]).token_nbytes(storage)


def test_values_have_the_head_size_of_the_keys_unless_told():
    assert FULL.v_head_dim == 64
    assert FULL.head_dims == (64, 64)
    assert WINDOW.head_dims == (33, 16)


def test_a_layer_with_a_window_slides():
    assert (FULL.kind, FULL.window, FULL.sinks) == ("full", None, 0)
    assert (WINDOW.kind, WINDOW.window, WINDOW.sinks) == ("sliding", 5, 1)


@pytest.mark.parametrize("name", ["num_heads", "head_dim", "v_head_dim", "window", "sinks"])
def test_bad_sizes_of_a_layer_are_refused_by_name(name):
    sizes = {"num_heads": 2, "head_dim": 8, "v_head_dim": 8, "window": 4, "sinks": 0}
    smallest = 0 if name == "sinks" else 1
    LayerSpec(**(sizes | {name: smallest}))
    with pytest.raises(InvalidValueError, match=f"^{name} is {smallest - 1}; expected an integer >= {smallest}$"):
        LayerSpec(**(sizes | {name: smallest - 1}))
    for wrong in (2.0, "2", True):
        with pytest.raises(InvalidTypeError, match=f"^{name} is a {type(wrong).__name__} "):
            LayerSpec(**(sizes | {name: wrong}))


def test_sinks_without_a_window_are_refused():
    with pytest.raises(InvalidValueError, match="sinks is 2 and window is None; expected sinks only with a window"):
        LayerSpec(num_heads=2, head_dim=8, sinks=2)


def test_specs_cannot_be_changed():
    spec = CacheSpec([FULL])
    with pytest.raises(FrozenInstanceError):
        FULL.num_heads = 4
    with pytest.raises(FrozenInstanceError):
        spec.layers = (WINDOW,)
    assert spec == CacheSpec([LayerSpec(num_heads=3, head_dim=64)])


def test_equal_specs_are_equal_keys():
    assert LayerSpec(num_heads=3, head_dim=64, v_head_dim=64) == FULL
    assert hash(LayerSpec(num_heads=3, head_dim=64, v_head_dim=64)) == hash(FULL)
    assert LayerSpec(num_heads=3, head_dim=64, window=5) != FULL
    spec = CacheSpec([FULL, WINDOW])
    spec.kinds  # noqa: B018  what is remembered is no part of the value
    assert spec == CacheSpec((FULL, WINDOW))
    assert hash(spec) == hash(CacheSpec((FULL, WINDOW)))
    assert spec != CacheSpec([WINDOW, FULL])


def test_a_list_of_layers_is_kept_as_a_tuple():
    layers = [FULL, WINDOW]
    spec = CacheSpec(layers)
    layers.clear()
    assert spec.layers == (FULL, WINDOW)


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ([], InvalidValueError, "layers is empty; expected at least one LayerSpec"),
        (FULL, InvalidTypeError, "layers is a LayerSpec; expected a list of LayerSpec"),
        (None, InvalidTypeError, "layers is a NoneType; expected a list of LayerSpec"),
        ([FULL, (3, 64)], InvalidTypeError, r"layers\[1\] is a tuple; expected a LayerSpec"),
        (
            [FULL, LayerSpec(1, 8, window=4), LayerSpec(1, 8, window=6)],
            InvalidValueError,
            r"layers have the windows and sinks \[\(4, 0\), \(6, 0\)\]; expected one for all sliding layers",
        ),
        (
            [LayerSpec(1, 8, window=4), LayerSpec(1, 8, window=4, sinks=1)],
            InvalidValueError,
            r"layers have the windows and sinks \[\(4, 0\), \(4, 1\)\]",
        ),
    ],
    ids=["empty", "no list", "None", "entry", "windows", "sinks"],
)
def test_bad_layers_are_refused(layers, error, message):
    with pytest.raises(error, match=message):
        CacheSpec(layers)


def test_kinds_name_their_layers_full_first():
    spec = CacheSpec([WINDOW, FULL, WINDOW, FULL, WINDOW])
    assert list(spec.kinds.items()) == [("full", (1, 3)), ("sliding", (0, 2, 4))]
    assert spec.rule("full") == (None, 0)
    assert spec.rule("sliding") == (5, 1)
    assert CacheSpec([WINDOW]).kinds == {"sliding": (0,)}
    assert CacheSpec([FULL, FULL]).kinds == {"full": (0, 1)}
