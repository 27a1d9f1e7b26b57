"""What a configuration of transformers says of the model's cache: which layers slide, how many heads, how large.

Only attributes are read, so nothing here imports transformers. The rules are its own (`get_layer_types_and_kwargs` and
`get_head_shapes`), and what a few models do otherwise.
"""

from typing import Any

from kvcache.errors import InvalidTypeError, InvalidValueError

# What configurations have whose layers keep something else than a key and a value for each token and head.
_OTHERWISE = {
    "kv_lora_rank": "layers keep one latent for all heads (MLA)",
    "cross_attention_layers": "these layers keep an image",
    "n_recurrent_loops": "layers run several times, and keep other rows each time",
    "attn_layers": "layers keep hash buckets",
    "skip": "layers without these parts may keep nothing",
}
# Where the first is there and differs from the second, the rules take the encoder's for the decoder's.
_DECODER_AND_ENCODER = (
    ("decoder_layers", "num_hidden_layers"),
    ("num_decoder_layers", "num_hidden_layers"),
    ("decoder_attention_heads", "num_attention_heads"),
)
_HEADS_FACTOR_OF_SLIDING = {"mimo_v2_flash": 2}  # in the model's code, not in its configuration


def decoder_config(config: Any) -> Any:
    """Return the part of a transformers configuration that is about the text decoder: mostly all of it.

    Raises:
        InvalidTypeError: `config` is no configuration of transformers.
    """
    if isinstance(config, type) or not (hasattr(config, "get_text_config") and hasattr(config, "per_layer_config")):
        raise InvalidTypeError(
            f"config is a {type(config).__name__}; expected a configuration of transformers, for instance model.config"
        )
    return config.get_text_config(decoder=True)


def layer_windows(decoder: Any) -> list[int | None]:
    """Return the window of each layer of a decoder, None where it is full.

    Raises:
        InvalidValueError: a layer is of another kind, or keeps no rows of its own.
    """
    _size(decoder, "num_hidden_layers")
    layers = decoder.per_layer_config
    kinds = getattr(decoder, "layer_types", None)
    if kinds is None:
        kinds = [_implied_kind(layer) for layer in layers]
    sharing = getattr(decoder, "kv_sharing_modes", None) or _implied_sharing(decoder, len(layers))
    for name, entries in (("layer_types", kinds), ("kv_sharing_modes", sharing)):
        if len(entries) != len(layers):
            raise InvalidValueError(f"{name} has {len(entries)} entries; expected num_hidden_layers={len(layers)}")
    windows = []
    for index, (kind, shares, layer) in enumerate(zip(kinds, sharing, layers, strict=True)):
        whose = "" if shares in (None, "store") else " with the rows of another layer"
        if whose or kind not in ("full_attention", "sliding_attention"):
            raise InvalidValueError(
                f"layer {index} of the model is of kind {kind!r}{whose}; expected full_attention or sliding_attention "
                "in every layer, with rows of its own; transformers' own DynamicCache takes the others"
            )
        windows.append(_size(layer, "sliding_window") if kind == "sliding_attention" else None)
    return windows


def _implied_kind(layer: Any) -> str:
    if getattr(layer, "sliding_window", None) is not None:
        return "sliding_attention"
    return "full_attention" if getattr(layer, "attention_chunk_size", None) is None else "chunked_attention"


def _implied_sharing(decoder: Any, num_layers: int) -> list[str | None]:
    num_shared = getattr(decoder, "num_kv_shared_layers", None) or 0  # all that transformers before 5.23 tells
    return [None] * (num_layers - num_shared) + ["reuse"] * num_shared


def layer_sizes(decoder: Any) -> list[tuple[int, int, int, int | None]]:
    """Return for each layer of a decoder the key/value heads, the head sizes of keys and values, and the window.

    Raises:
        InvalidValueError: a layer keeps something else than keys and values of each head, or sizes are not told.
    """
    windows = layer_windows(decoder)
    if not hasattr(decoder, "use_cache"):
        raise InvalidValueError(f"{type(decoder).__name__} has no use_cache; expected a model that can use a cache")
    for mine, other in _DECODER_AND_ENCODER:
        size = vars(decoder).get(mine)
        if size is not None and size != getattr(decoder, other):
            raise InvalidValueError(
                f"{type(decoder).__name__} has {mine}={size} and {other}={getattr(decoder, other)}; expected the same"
            )
    return [_sizes_of(*each) for each in zip(range(len(windows)), decoder.per_layer_config, windows, strict=True)]


def _sizes_of(index: int, layer: Any, window: int | None) -> tuple[int, int, int, int | None]:
    for name, what in _OTHERWISE.items():
        if value := getattr(layer, name, None):
            raise InvalidValueError(
                f"layer {index} of the model has {name}={value!r}: {what}; expected a key and a value for each head in "
                "every layer"
            )
    heads = _size(layer, "num_attention_heads")
    # Falcon; its new architecture repeats keys and values for all heads before it caches them
    multi_query = getattr(layer, "multi_query", False) and not getattr(layer, "new_decoder_architecture", False)
    kv_heads = 1 if multi_query else _size_if_told(layer, "num_key_value_heads") or heads
    if window is not None:
        kv_heads *= _HEADS_FACTOR_OF_SLIDING.get(layer.model_type, 1)
    head_dim = _size_if_told(layer, "head_dim", "dim_head") or _size(layer, "hidden_size") // heads
    return kv_heads, head_dim, _size_if_told(layer, "v_head_dim") or head_dim, window


def _size_if_told(config: Any, *names: str) -> int | None:
    return next((_size(config, name) for name in names if getattr(config, name, None)), None)


def _size(config: Any, name: str) -> int:
    size = getattr(config, name, None)
    if not isinstance(size, int) or size < 1:
        raise InvalidValueError(f"{type(config).__name__} has {name}={size!r}; expected an integer >= 1")
    return size
