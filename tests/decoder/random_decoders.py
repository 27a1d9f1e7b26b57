"""Random decoders as plain data, and pools and steps for them, with NaN wherever nothing may be read."""

from dataclasses import replace

import torch

from kvcache import BlockPool, CacheSpec, LayerSpec
from kvcache.decoder import DecoderDescription, DecoderLayer, Embedding, Linear, Norm
from kvcache.decoder.weights import in_int8
from tests.storage.pools import poison

NAN = float("nan")


class RandomTensors:
    """Tensors of one dtype, each in the middle of a larger one of NaN."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def numbers(self, count: int, mean: float = 0.0, std: float = 0.3) -> torch.Tensor:
        """(count,)"""
        return amid_nan(mean + std * torch.randn(count, generator=self.generator), self.dtype)

    def matrix(self, rows: int, columns: int, size: float = 1.0) -> torch.Tensor:
        """(rows, columns), whose products with numbers around 1 are around `size`."""
        return amid_nan(size * columns**-0.5 * torch.randn(rows, columns, generator=self.generator), self.dtype)

    def linear(self, rows: int, columns: int, bias: bool, size: float = 1.0) -> Linear:
        return Linear(self.matrix(rows, columns, size), self.numbers(rows) if bias else None)


def amid_nan(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return these numbers as a view into a larger tensor, whose others are NaN (or 127)."""
    around = [size + 5 for size in values.shape]
    larger = torch.full(around, NAN if dtype.is_floating_point else 127, dtype=dtype)
    view = larger[tuple(slice(2, 2 + size) for size in values.shape)]
    view.copy_(values)
    return view


def turns(base: float, head_dim: int):
    """Return the rotary function of heads of this size."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)

    def of(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (positions.double()[:, None] * frequencies).repeat(1, 2)
        return angles.cos().float(), angles.sin().float()

    return of


def random_decoder(
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    hidden: int = 40,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    v_head_dim: int | None = None,
    inner: int = 50,
    vocab: int = 37,
    windows: tuple[int | None, ...] = (None, 7),
    sinks: int = 0,
    bias: bool = False,
    head_norms: bool = False,
    four_norms: bool = False,
    norm_offset: float = 0.0,
    softcap: float | None = None,
    head_softcap: float | None = None,
    activation: str = "silu",
    tied: bool = False,
    embedding_scale: float = 1.0,
) -> DecoderDescription:
    """Return a decoder with a layer for each of `windows`, whose sliding layers have positions of their own."""
    random = RandomTensors(seed, dtype)

    def norm(count: int = hidden) -> Norm:
        return Norm(random.numbers(count, mean=1 - norm_offset), 1e-6, norm_offset)

    def layer(window: int | None) -> DecoderLayer:
        spec = LayerSpec(kv_heads, head_dim, v_head_dim, window, sinks if window else 0)
        k_dim, v_dim = spec.head_dims
        return DecoderLayer(
            spec=spec,
            num_heads=heads,
            scale=k_dim**-0.5,
            softcap=softcap,
            rotary=spec.kind,
            activation=activation,
            input_norm=norm(),
            query=random.linear(heads * k_dim, hidden, bias),
            key=random.linear(kv_heads * k_dim, hidden, bias),
            value=random.linear(kv_heads * v_dim, hidden, bias),
            query_norm=norm(k_dim) if head_norms else None,
            key_norm=norm(k_dim) if head_norms else None,
            out=random.linear(hidden, heads * v_dim, bias),
            attended_norm=norm() if four_norms else None,
            mlp_norm=norm(),
            gate=random.linear(inner, hidden, bias),
            up=random.linear(inner, hidden, bias),
            down=random.linear(hidden, inner, bias),
            computed_norm=norm() if four_norms else None,
        )

    table = random.matrix(vocab, hidden, size=hidden**0.5)
    return DecoderDescription(
        embedding=Embedding(table, embedding_scale),
        layers=tuple(layer(window) for window in windows),
        norm=norm(),
        head=Linear(table) if tied else random.linear(vocab, hidden, bias, size=3.0),
        head_softcap=head_softcap,
        rotary={"full": turns(10000.0, head_dim), "sliding": turns(100.0, head_dim)},
    )


def joined(first: DecoderDescription, second: DecoderDescription) -> DecoderDescription:
    """Return the first decoder with the layers of the second, and their positions, behind its own."""
    layers = tuple(replace(layer, rotary=f"second {layer.rotary}") for layer in second.layers)
    rotary = {**first.rotary, **{f"second {name}": turn for name, turn in second.rotary.items()}}
    return replace(first, layers=(*first.layers, *layers), rotary=rotary)


def compressed(decoder: DecoderDescription) -> DecoderDescription:
    """Return the decoder with int8 matrices, whose rows stand apart."""

    def encoded(linear: Linear) -> Linear:
        linear = in_int8(linear)
        return replace(linear, weight=amid_nan(linear.weight, torch.int8))

    layers = tuple(
        replace(layer, **{name: encoded(linear) for name, linear in layer.linears.items()}) for layer in decoder.layers
    )
    return replace(decoder, layers=layers, head=encoded(decoder.head))


def pool_for(decoder: DecoderDescription, block_size: int = 4, storage: str = "float32", num_tokens: int = 400):
    """Return a pool of blocks of NaN."""
    spec = CacheSpec(tuple(layer.spec for layer in decoder.layers) or (LayerSpec(1, 2),))
    pool = BlockPool(spec, num_tokens // block_size + 12, block_size, storage)
    poison(pool)
    return pool


def with_pasts(pool: BlockPool, lengths: list[int], seed: int = 0):
    """Return sequences that hold random rows for so many tokens."""
    generator = torch.Generator().manual_seed(seed)
    sequences = [pool.new_sequence() for _ in lengths]
    filled = [(sequence, length) for sequence, length in zip(sequences, lengths, strict=True) if length]
    if filled:
        with pool.step([sequence for sequence, _ in filled], [[0] * length for _, length in filled]) as step:
            for index, layer in enumerate(pool.spec.layers):
                for_rows = (1, layer.num_heads, sum(lengths))
                k, v = (torch.randn(*for_rows, head_dim, generator=generator) for head_dim in layer.head_dims)
                step.append(index, k, v)
    return sequences


def new_ids(counts: list[int], vocab: int, seed: int = 0) -> list[list[int]]:
    """Return random ids, so many for each sequence."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (count,), generator=generator).tolist() for count in counts]
