"""A small decoder with a cache of its own, right or with one of the faults that such caches have had."""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.nn.functional import silu

from kvcache.verify import Decoder

VOCAB = 61
WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 4, 2, 8, 2

# The cause that has to be named, and ways in which it happens.
FAULTS = {
    "position offset": ("one too far", "one too few", "from zero again", "the same for a whole chunk"),
    "mask alignment": (
        "chunk aligned on the left",
        "all aligned on the left",
        "chunk sees its future",
        "padding is seen",
    ),
    "window bound": ("one token too many", "one token too few"),
    "unmasked tail": ("all slots",),
    "stale rows after rollback": ("rows stay", "nothing happens"),
    "K taken for V": ("in all layers", "in the last layer"),
    "crossed heads": ("values", "keys", "keys and values"),
    "rows swapped in a batch": ("at decoding", "reorder does nothing"),
    "one position for all rows": ("padding counts at decoding",),
    "prompt fed twice": ("rows twice",),
    "frozen scale": ("of the first tokens",),
    "overwrite at capacity": ("the last slot", "round and round"),
}


@dataclass
class Cache:
    """Keys and values of all layers (LAYERS, B, KV_HEADS, capacity, HEAD_DIM)."""

    k: torch.Tensor
    v: torch.Tensor
    length: int = 0  # of the text
    num_rows: int = 0  # that are stored; the same, if all is right
    padding: torch.Tensor | None = None
    scales: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # of a lossy cache, by layer


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.v = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.mlp = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, positions, attend):
        normed = self.norm(x)
        q, k, v = (f(normed).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = attend(_rotated(q, positions), _rotated(k, positions), v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + silu(self.mlp(x))


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        for weights in self.parameters():
            weights.data.normal_(std=0.35)


class FaultyDecoder(Decoder):
    """`fault` is a cause, `way` one of its ways; None for a decoder that is right."""

    def __init__(self, fault: str | None = None, way: str | None = None, *, window: int | None = None, seed: int = 0):
        assert fault is None or way in FAULTS[fault]
        self.module = Model(seed).eval()
        self.vocab_size = VOCAB
        self.fault, self.way = fault, way
        self.window = window
        self.windows = () if window is None else (window,)
        self.is_lossy = fault == "frozen scale"

    def has(self, fault: str, way: str | None = None) -> bool:
        return self.fault == fault and way in (None, self.way)

    def new_cache(self, batch_size: int, capacity: int) -> Cache:
        shape = LAYERS, batch_size, KV_HEADS, capacity * (2 if self.fault else 1) + 1, HEAD_DIM
        if self.has("overwrite at capacity") or self.has("unmasked tail"):
            shape = LAYERS, batch_size, KV_HEADS, capacity, HEAD_DIM
        k, v = (torch.zeros(shape, dtype=self.dtype) for _ in range(2))
        return Cache(k, v)

    def forward(self, tokens, cache=None, padding=None):
        if cache is None:
            return self._run(tokens, None, None)
        cache.padding = padding if padding is not None else cache.padding
        if self.has("prompt fed twice") and cache.length == 0:
            self._run(tokens, cache, cache.padding)
        return self._run(tokens, cache, cache.padding)

    def _run(self, tokens, cache, padding):
        batch_size, num_new = tokens.shape
        past = 0 if cache is None else cache.length
        padding = torch.zeros(batch_size, dtype=torch.int64) if padding is None else padding
        positions = past + torch.arange(num_new).expand(batch_size, -1) - padding[:, None]
        if cache is not None:
            positions = self._faulty_positions(positions, padding, past)
        x = self.module.embedding(tokens)
        for index, layer in enumerate(self.module.layers):
            x = layer(x, positions, partial(self._attend, cache, padding, past, index))
        if cache is not None:
            cache.length += num_new
            cache.num_rows += num_new
        return self.module.head(x)

    def _attend(self, cache, padding, past, index, q, k, v):
        num_new = q.shape[2]
        visible = _visible(torch.arange(past, past + num_new), past + num_new, self.window)
        if cache is not None:
            k, v, visible = self._through_cache(cache, index, k, v)
        if cache is None or not self.has("mask alignment", "padding is seen"):
            slots = torch.arange(visible.shape[-1])
            visible = visible & (slots >= padding[:, None])[:, None, None]
        k, v = (rows.repeat_interleave(HEADS // KV_HEADS, dim=1) for rows in (k, v))
        scores = (q @ k.transpose(-1, -2) * HEAD_DIM**-0.5).masked_fill(~visible, -torch.inf)
        return scores.softmax(-1).nan_to_num() @ v

    def _faulty_positions(self, positions, padding, past):
        if past > 0 and self.has("one position for all rows"):
            return positions + padding[:, None]
        if past == 0 or self.fault != "position offset":
            return positions
        return {
            "one too far": positions + 1,
            "one too few": positions - 1,
            "from zero again": positions - past,
            "the same for a whole chunk": positions[:, :1].expand_as(positions),
        }[self.way]

    def _through_cache(self, cache, index, k, v):
        num_new, start = k.shape[2], cache.num_rows
        end, capacity = start + num_new, cache.k.shape[3]
        places = torch.arange(start, end)
        if self.has("overwrite at capacity"):
            places = places.clamp(max=capacity - 1) if self.way == "the last slot" else places % capacity
        elif end > capacity - (self.fault is None):
            raise ValueError(f"{end} rows do not fit")
        if self.has("frozen scale"):
            k, v = (self._rounded(cache, index, part, rows) for part, rows in enumerate((k, v)))
        cache.k[index][:, :, places] = k
        cache.v[index][:, :, places] = v
        num_rows = capacity if self.has("unmasked tail") else min(end, capacity)
        k, v = cache.k[index][:, :, :num_rows], cache.v[index][:, :, :num_rows]
        queries = torch.arange(start, end).clamp(max=capacity - 1)
        window = self.window
        if self.has("window bound"):
            window += 1 if self.way == "one token too many" else -1
        visible = _visible(queries, num_rows, window)
        if self.has("mask alignment", "all aligned on the left") or (
            self.has("mask alignment", "chunk aligned on the left") and num_new > 1
        ):
            visible = _visible(torch.arange(num_new), num_rows, window)
        if self.has("mask alignment", "chunk sees its future") or self.has("unmasked tail"):
            visible = torch.ones_like(visible) if start > 0 or self.has("unmasked tail") else visible
        if self.has("K taken for V") and (self.way == "in all layers" or index == LAYERS - 1):
            v = k
        if self.has("crossed heads"):
            k = k.flip(1) if "keys" in self.way else k
            v = v.flip(1) if "values" in self.way else v
        if self.has("rows swapped in a batch", "at decoding") and num_new == 1:
            k, v = k.roll(1, 0), v.roll(1, 0)
        return k, v, visible

    def _rounded(self, cache, index, part, rows):
        scale = rows.abs().amax((1, 2, 3), keepdim=True) / 127
        scale = cache.scales.setdefault((index, part), scale)
        return (rows / scale).round().clamp(-127, 127) * scale

    def rollback(self, cache, num_tokens):
        if self.has("stale rows after rollback", "nothing happens"):
            return
        cache.length -= num_tokens
        if not self.has("stale rows after rollback"):
            cache.num_rows -= num_tokens

    def reorder(self, cache, index):
        cache.padding = None if cache.padding is None else cache.padding[index]
        if not self.has("rows swapped in a batch", "reorder does nothing"):
            cache.k, cache.v = cache.k[:, index].clone(), cache.v[:, index].clone()


def _visible(queries, num_rows, window):
    """(T, rows): the causal rule, and the window's."""
    slots = torch.arange(num_rows)
    visible = slots <= queries[:, None]
    return visible if window is None else visible & (slots > queries[:, None] - window)


def _rotated(x, positions):
    frequencies = 100.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = (positions[:, None, :, None] * frequencies).to(torch.float64)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
