"""A decoder like Llama run by this package itself: described as plain data, its weights read once for a step's tokens.

    description.py   what such a decoder is made of
    weights.py       its matrices: as they are, or in int8 with a scale for 32 of a row
    rotary.py        cosines and sines of positions, in tables that grow
    few_rows.py      a step of few tokens: one call of the native kernels for all layers
    many_rows.py     a step of many: PyTorch's matrix products, in the dtype that this processor multiplies fastest

`kvcache.hf.NativeDecoder` makes the description of a transformers model, and runs steps of a pool with it.
"""

from kvcache.decoder.description import DecoderDescription, DecoderLayer, Embedding, Linear, Norm
from kvcache.decoder.few_rows import FewRows
from kvcache.decoder.many_rows import ManyRows

__all__ = ["DecoderDescription", "DecoderLayer", "Embedding", "FewRows", "Linear", "ManyRows", "Norm"]
