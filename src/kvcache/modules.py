"""A causal self-attention module that prefills a prompt and then decodes token by token with a cache."""

import torch
from torch import nn

from kvcache.attention import attend
from kvcache.checks import check_int, check_tensor
from kvcache.errors import InvalidTypeError, InvalidValueError
from kvcache.storage import KVCache, LayerCache


class CausalSelfAttentionWithCache(nn.Module):
    """Multi-head causal self-attention, without positions of its own, that can read its past from a cache.

    Args:
        d_model: size of the token vectors, a multiple of `num_heads`.
        num_heads: query heads, H.
        num_kv_heads: key/value heads, Hkv, a divisor of H; default H.
        max_seq_len: capacity of the caches that `forward` creates.

    Attributes:
        qkv_proj: linear, d_model -> (H + 2 Hkv) head_dim, no bias: queries, then keys, then values, each head after
            head. With Hkv = H that is 3 d_model, read as (batch, seq, 3, num_heads, head_dim).
        out_proj: linear, d_model -> d_model, no bias.
        d_model, num_heads, num_kv_heads, head_dim, scale, max_seq_len: as given or derived.

    Raises:
        InvalidValueError, InvalidTypeError: a size is below 1 or does not divide another.

    >>> attention = CausalSelfAttentionWithCache(d_model=32, num_heads=4)
    >>> x = torch.randn(1, 5, 32)
    >>> prompt_output, cache = attention(x[:, :4], use_cache=True)  # prefill
    >>> token_output, cache = attention(x[:, 4:], cache, use_cache=True)  # decode
    >>> uncached, _ = attention(x)
    >>> torch.allclose(torch.cat([prompt_output, token_output], dim=1), uncached, atol=1e-6)
    True
    """

    def __init__(
        self, d_model: int, num_heads: int, *, num_kv_heads: int | None = None, max_seq_len: int = 2048
    ) -> None:
        super().__init__()
        self.d_model = check_int("d_model", d_model, minimum=1)
        self.num_heads = check_int("num_heads", num_heads, minimum=1)
        self.num_kv_heads = self.num_heads if num_kv_heads is None else check_int("num_kv_heads", num_kv_heads, 1)
        self.max_seq_len = check_int("max_seq_len", max_seq_len, minimum=0)
        if self.d_model % self.num_heads:
            raise InvalidValueError(f"d_model is {d_model}; expected a multiple of num_heads = {num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise InvalidValueError(f"num_kv_heads is {num_kv_heads}; expected a divisor of num_heads = {num_heads}")
        self.head_dim = self.d_model // self.num_heads
        self.scale = self.head_dim**-0.5
        self.qkv_proj = nn.Linear(d_model, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(
        self, x: torch.Tensor, kv_cache: LayerCache | None = None, use_cache: bool = False
    ) -> tuple[torch.Tensor, LayerCache | None]:
        """Attend the T tokens of `x` causally, over themselves and over what the cache holds.

        Args:
            x: (B, T, d_model), the new tokens only; T may be 0.
            kv_cache: a cache of one layer for B rows and Hkv heads of head_dim: `KVCache`, `SlidingWindowCache`,
                `PagedCache`.
            use_cache: append the new tokens to `kv_cache` and attend over all it holds. Without a `kv_cache` a new
                one of `max_seq_len` tokens is created. False ignores `kv_cache` and returns it unchanged.

        Returns:
            The output (B, T, d_model) and the cache.

        Raises:
            CacheFullError: the new tokens do not fit; the cache is unchanged.
            InvalidValueError, InvalidTypeError: `x` or `kv_cache` does not fit the module; the cache is unchanged.
        """
        weight = self.qkv_proj.weight
        check_tensor("x", x, (None, None, self.d_model), "(B, T, d_model)", weight.device)
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise InvalidTypeError(f"x has dtype {x.dtype}; expected {weight.dtype}, as the weights have")
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv_proj(x).unflatten(-1, (heads + 2 * kv_heads, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)  # (B, H, T, head_dim), (B, Hkv, T, head_dim) twice

        if not use_cache:
            attended = attend(q, k, v, scale=self.scale)
        else:
            if kv_cache is None:
                kv_cache = KVCache(x.shape[0], kv_heads, self.head_dim, self.max_seq_len, k.dtype, x.device)
            self._check_cache(kv_cache, x)
            attended = kv_cache.append_and_attend(q, k, v, scale=self.scale)
        return self.out_proj(attended.transpose(1, 2).flatten(2)), kv_cache

    def _check_cache(self, kv_cache: LayerCache, x: torch.Tensor) -> None:
        if not isinstance(kv_cache, LayerCache):
            raise InvalidTypeError(
                f"kv_cache is a {type(kv_cache).__name__}; expected a KVCache, SlidingWindowCache or PagedCache"
            )
        for name, expected in (
            ("batch_size", x.shape[0]),
            ("num_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("v_head_dim", self.head_dim),
            ("device", x.device),
        ):
            if (actual := getattr(kv_cache, name)) != expected:
                raise InvalidValueError(f"kv_cache has {name} = {actual}; expected {expected}")

    def extra_repr(self) -> str:
        """Return what `repr` shows beside the projections."""
        return f"d_model={self.d_model}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
