"""The keys of blocks: digests of all that a block's rows depend on, the same in every process.

Within a process blocks are found without them (`kvcache.prefix.nodes`).

    key of a text's first block     digest(parent = root key, content)
    key of the next one             digest(parent = key of the one before, content)
    root key                        digest(format version, namespace)

Every field stands with its label and its length, so that no two different inputs are the same bytes.
"""

import struct
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from kvcache.errors import InvalidTypeError, InvalidValueError

FORMAT = b"kvcache blocks 1"  # to be changed whenever rows or keys come to mean something else


def digest(data: bytes) -> bytes:
    """Return 32 bytes that stand for `data`."""
    return blake2b(data, digest_size=32).digest()


def root_key(namespace: bytes) -> bytes:
    """Return what stands for the parent of the first block of every text in a namespace (see `encoded`)."""
    return digest(_field(b"format", FORMAT) + _field(b"namespace", namespace))


def block_key(parent: bytes, content: bytes) -> bytes:
    """Return the key of a block with this content (see `kvcache.prefix.content`) behind the block `parent`."""
    return digest(b"%s%s" % (_field(b"parent", parent), _field(b"content", content)))


def encoded(name: str, value: Any) -> bytes:
    """Return plain data as bytes that are equal for equal data only, in every process.

    Plain data are None, bools, ints, floats, strings, bytes, and lists, tuples and mappings of these; the order of a
    mapping does not count, and a list is the tuple of its entries. Data of different types are different: 1 is not 1.0
    or True.

    Raises:
        InvalidTypeError: `value` is no plain data; the message begins with `name`.
        InvalidValueError: it is nested too deeply, or holds itself.
    """
    try:
        return _encoded(name, value)
    except RecursionError:
        raise InvalidValueError(f"{name} is nested too deeply, or holds itself; expected flat plain data") from None


def _encoded(name: str, value: Any) -> bytes:
    if value is None:
        return _field(b"none", b"")
    if isinstance(value, bool):
        return _field(b"bool", b"1" if value else b"0")
    if isinstance(value, int):
        return _field(b"int", value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
    if isinstance(value, float):
        return _field(b"float", struct.pack(">d", value))
    if isinstance(value, str):
        return _field(b"str", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return _field(b"bytes", value)
    if isinstance(value, (list, tuple)):
        return _field(b"list", b"".join(_encoded(f"{name}[{index}]", entry) for index, entry in enumerate(value)))
    if isinstance(value, Mapping):
        entries = ((_encoded(f"a key of {name}", key), key, entry) for key, entry in value.items())
        pairs = sorted((key_bytes, _encoded(f"{name}[{key!r}]", entry)) for key_bytes, key, entry in entries)
        return _field(b"mapping", b"".join(map(b"".join, pairs)))
    raise InvalidTypeError(
        f"{name} is a {type(value).__name__}; expected plain data: None, a bool, int, float, str, bytes, or a list, "
        "tuple or mapping of these"
    )


def _field(label: bytes, data: bytes) -> bytes:
    return b"%c%s%s%s" % (len(label), label, len(data).to_bytes(8, "big"), data)
