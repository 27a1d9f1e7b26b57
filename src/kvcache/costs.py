"""What decoding costs, by arithmetic alone: how many projections are computed and how many bytes are kept."""

import torch

from kvcache.checks import check_bool, check_int
from kvcache.storage.codecs import StorageLike, check_storage
from kvcache.storage.specs import LayerSpec


def count_qkv_projections(prompt_len: int, gen_len: int, use_cache: bool) -> dict[str, int | bool]:
    """Count the query, key and value projections of single tokens that one layer computes for one sequence.

    With a cache every token is projected once: `3 * (prompt_len + gen_len)`. Without one, the step that adds
    token t of the generated ones projects the whole sequence again: the sum of `3 * (prompt_len + t)` over
    t = 1 .. gen_len.

    This is the textbook count. A real generation loop never processes the last token that it samples, so a
    measured run computes 3 fewer with the cache.

    Args:
        prompt_len: tokens in the prompt, >= 0.
        gen_len: tokens generated after it, >= 0.
        use_cache: whether the keys and values of earlier tokens are kept.

    Returns:
        `total_projections`, the count of one layer, and `with_cache`, which is `use_cache`.

    Raises:
        InvalidTypeError: (a `TypeError`) a length is not an integer, or `use_cache` is not a bool.
        InvalidValueError: (a `ValueError`) a length is negative.

    >>> count_qkv_projections(100, 200, use_cache=True)
    {'total_projections': 900, 'with_cache': True}
    >>> count_qkv_projections(100, 200, use_cache=False)
    {'total_projections': 120300, 'with_cache': False}
    """
    prompt_len = check_int("prompt_len", prompt_len, minimum=0)
    gen_len = check_int("gen_len", gen_len, minimum=0)
    check_bool("use_cache", use_cache)
    tokens = prompt_len + gen_len if use_cache else gen_len * prompt_len + gen_len * (gen_len + 1) // 2
    return {"total_projections": 3 * tokens, "with_cache": use_cache}


def cache_nbytes(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    seq_len: int,
    *,
    batch_size: int = 1,
    dtype: StorageLike = torch.float32,
    v_head_dim: int | None = None,
) -> int:
    """Return the bytes that the keys and values of `seq_len` tokens take.

    The formula is `num_layers * batch_size * num_kv_heads * seq_len * (head_dim + v_head_dim) * itemsize`, with
    itemsize the bytes of one number: 2 for float16 and bfloat16, 4 for float32, 8 for float64. For int8 it is 1 and
    for int4 a half, and each group of 32 channels (the last may be shorter) takes 4 bytes more.

    Args:
        num_layers: layers of the model, >= 1.
        num_kv_heads: key/value heads of a layer (with grouped queries fewer than the query heads), >= 1.
        head_dim: size of a key, >= 1.
        seq_len: tokens stored for each sequence, >= 0.
        batch_size: sequences, >= 1.
        dtype: how the rows are kept: a floating torch dtype or its name, or another `storage` of `KVCache`.
        v_head_dim: size of a value, >= 1; by default `head_dim`.

    Raises:
        InvalidTypeError: (a `TypeError`) a size is not an integer, or `dtype` neither a dtype nor a name.
        InvalidValueError: (a `ValueError`) a size is too small, or `dtype` is not a supported floating one.

    SmolLM2-135M keeps 23040 bytes a token in 16 bits, so 8192 tokens take 180 MiB:

    >>> cache_nbytes(num_layers=30, num_kv_heads=3, head_dim=64, seq_len=1, dtype="bfloat16")
    23040
    >>> cache_nbytes(num_layers=30, num_kv_heads=3, head_dim=64, seq_len=8192, dtype=torch.bfloat16) // 2**20
    180
    """
    layer = LayerSpec(check_int("num_kv_heads", num_kv_heads, minimum=1), head_dim, v_head_dim)
    tokens = (
        check_int("num_layers", num_layers, minimum=1)
        * check_int("batch_size", batch_size, minimum=1)
        * check_int("seq_len", seq_len, minimum=0)
    )
    return tokens * layer.token_nbytes(check_storage("dtype", dtype))
