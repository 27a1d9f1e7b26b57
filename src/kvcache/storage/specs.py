"""What one layer, and one model, keeps of a token: head counts, head sizes, and which tokens stay visible."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from kvcache.checks import check_int
from kvcache.errors import InvalidTypeError, InvalidValueError
from kvcache.storage.codecs import StorageLike, check_storage
from kvcache.storage.model_config import decoder_config, layer_sizes

KINDS = ("full", "sliding")


@dataclass(frozen=True)
class LayerSpec:
    """The keys and values of one attention layer.

    Args:
        num_heads: key/value heads, Hkv >= 1.
        head_dim: head size of the keys, D >= 1.
        v_head_dim: head size of the values, Dv; default D.
        window: a query sees its last `window` tokens, itself included; default None: all.
        sinks: with a window, the first `sinks` tokens stay visible for ever.

    Raises:
        InvalidValueError, InvalidTypeError: a size is out of range, or there are sinks without a window.

    >>> LayerSpec(num_heads=3, head_dim=64).token_nbytes("bfloat16")
    768
    """

    num_heads: int
    head_dim: int
    v_head_dim: int | None = None
    window: int | None = None
    sinks: int = 0

    def __post_init__(self) -> None:
        sizes = {
            "num_heads": check_int("num_heads", self.num_heads, minimum=1),
            "head_dim": check_int("head_dim", self.head_dim, minimum=1),
            "sinks": check_int("sinks", self.sinks, minimum=0),
        }
        v_head_dim = sizes["head_dim"] if self.v_head_dim is None else self.v_head_dim
        sizes["v_head_dim"] = check_int("v_head_dim", v_head_dim, minimum=1)
        if self.window is not None:
            sizes["window"] = check_int("window", self.window, minimum=1)
        for name, size in sizes.items():  # plain ints, whatever integers came
            object.__setattr__(self, name, size)
        if self.window is None and self.sinks:
            raise InvalidValueError(f"sinks is {self.sinks} and window is None; expected sinks only with a window")

    @property
    def kind(self) -> str:
        """ "full" or "sliding"."""
        return "full" if self.window is None else "sliding"

    @property
    def head_dims(self) -> tuple[int, int]:
        """The head sizes of keys and values."""
        assert self.v_head_dim is not None
        return self.head_dim, self.v_head_dim

    def token_nbytes(self, storage: StorageLike) -> int:
        """Return the bytes of one token's keys and values, kept as `storage` says; see `BlockPool`."""
        codecs = check_storage("storage", storage)
        k_dim, v_dim = self.head_dims
        return self.num_heads * (codecs.k.nbytes(k_dim) + codecs.v.nbytes(v_dim))


@dataclass(frozen=True)
class CacheSpec:
    """The layers of one model, each with its own sizes.

    Layers of one kind share their block tables, so all sliding layers have one window and one number of sinks.

    Args:
        layers: one `LayerSpec` a layer, at least one, in the model's order.

    Raises:
        InvalidValueError, InvalidTypeError: no layers, an entry that is none, or sliding layers with different windows.

    >>> CacheSpec([LayerSpec(num_heads=3, head_dim=64)] * 30).token_nbytes("bfloat16")
    23040
    """

    layers: tuple[LayerSpec, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.layers, (list, tuple)):
            raise InvalidTypeError(f"layers is a {type(self.layers).__name__}; expected a list of LayerSpec")
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, LayerSpec):
                raise InvalidTypeError(f"layers[{index}] is a {type(layer).__name__}; expected a LayerSpec")
        if not self.layers:
            raise InvalidValueError("layers is empty; expected at least one LayerSpec")
        rules = {(layer.window, layer.sinks) for layer in self.layers if layer.kind == "sliding"}
        if len(rules) > 1:
            raise InvalidValueError(
                f"layers have the windows and sinks {sorted(rules)}; expected one for all sliding layers"
            )
        object.__setattr__(self, "layers", tuple(self.layers))

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Return what a transformers model with this configuration keeps, if all its layers are full or sliding.

        Plain, grouped and multi-query attention, hybrid models, layers of different sizes. A configuration of several
        models (vision and text, encoder and decoder) stands for its text decoder.

        Raises:
            InvalidTypeError: `config` is no configuration of transformers.
            InvalidValueError: a layer is of another kind or keeps something else than keys and values of each head, or
                sizes are not told, or sliding layers have different windows.
        """
        return cls(tuple(LayerSpec(*sizes) for sizes in layer_sizes(decoder_config(config))))

    @cached_property
    def kinds(self) -> dict[str, tuple[int, ...]]:
        """The indices of the layers of each kind there is, "full" first."""
        members = {kind: tuple(i for i, layer in enumerate(self.layers) if layer.kind == kind) for kind in KINDS}
        return {kind: indices for kind, indices in members.items() if indices}

    def rule(self, kind: str) -> tuple[int | None, int]:
        """Return the window and the sinks of the layers of this kind."""
        layer = self.layers[self.kinds[kind][0]]
        return layer.window, layer.sinks

    def token_nbytes(self, storage: StorageLike, kind: str | None = None) -> int:
        """Return the bytes of one token's keys and values in all layers, or in those of one kind.

        Raises:
            InvalidValueError, InvalidTypeError: `storage` or `kind` is none that there is.
        """
        if kind is not None:
            self.check_kind(kind)
        return sum(layer.token_nbytes(storage) for layer in self.layers if kind in (None, layer.kind))

    def nbytes(self, num_blocks: int | Mapping[str, int], block_size: int, storage: StorageLike) -> int:
        """Return the bytes of a `BlockPool` made with these arguments.

        Raises:
            InvalidValueError, InvalidTypeError: an argument is out of range or of the wrong kind.
        """
        rows = {kind: count * check_int("block_size", block_size, 1) for kind, count in self.blocks(num_blocks).items()}
        return sum(count * self.token_nbytes(storage, kind) for kind, count in rows.items())

    def kept_nbytes(
        self, num_tokens: int, storage: StorageLike, kind: str | None = None, *, block_size: int | None = None
    ) -> int:
        """Return the bytes that a sequence keeps at most as it grows to `num_tokens`: `kept_rows` of each layer.

        Raises:
            InvalidValueError, InvalidTypeError: `storage` or `kind` is none that there is.
        """
        return sum(
            kept_rows(num_tokens, *self.rule(each), block_size=block_size) * self.token_nbytes(storage, each)
            for each in (self.kinds if kind is None else (kind,))
        )

    def blocks(self, num_blocks: Any) -> dict[str, int]:
        """Return `num_blocks`, one number or one for each kind, as the blocks of each kind.

        Raises:
            InvalidValueError, InvalidTypeError: other kinds are named, or a number is none or below 1.
        """
        if not isinstance(num_blocks, Mapping):
            return dict.fromkeys(self.kinds, check_int("num_blocks", num_blocks, minimum=1))
        if set(num_blocks) != set(self.kinds):
            raise InvalidValueError(f"num_blocks has the kinds {list(num_blocks)}; expected {list(self.kinds)}")
        return {kind: check_int(f"num_blocks[{kind!r}]", num_blocks[kind], minimum=1) for kind in self.kinds}

    def check_kind(self, kind: Any) -> None:
        """Check that there are layers of this kind."""
        if not isinstance(kind, str) or kind not in self.kinds:
            raise InvalidValueError(f"kind is {kind!r}; expected one of {list(self.kinds)}")


def kept_rows(num_tokens: int, window: int | None = None, sinks: int = 0, *, block_size: int | None = None) -> int:
    """Return how many rows of a sequence a layer keeps at most while it decodes up to `num_tokens` tokens.

    `num_tokens` without a window, with one `min(num_tokens, sinks + window)`. In blocks both are whole blocks; those
    of a window need not begin where it does, and a step takes its new block before it gives one back, so there is one
    more: `ceil(sinks / block_size) + ceil(window / block_size) + 1` blocks.

    >>> kept_rows(1000, window=512), kept_rows(1000, block_size=64), kept_rows(1000, window=512, block_size=64)
    (512, 1024, 576)
    """
    if block_size is None:
        return num_tokens if window is None else min(num_tokens, sinks + window)
    blocks = -(-num_tokens // block_size)
    if window is not None:
        blocks = min(blocks, -(-sinks // block_size) + -(-window // block_size) + 1)
    return blocks * block_size
