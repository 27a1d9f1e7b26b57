"""What modules and configurations hold besides tensors, as text.

Plain data is bools, ints, floats, strings, None, and lists, tuples, dicts and sets of these. Two values have the same
text exactly if they are equal and of the same kinds, in any process; the order of dicts and sets does not count.
"""

from enum import Enum
from functools import lru_cache
from types import NoneType
from typing import Any

import torch
from torch import nn

_ATOMS = frozenset((bool, int, float, str, NoneType))
_PLAIN = (str, float, dict, list, tuple, set, frozenset)
_MACHINERY = frozenset(vars(nn.Module())) - {"training"}
# Where the weights came from and how they were loaded; tensors have dtypes and devices of their own.
_ORIGIN = frozenset(
    {
        "_is_hf_initialized",
        "_name_or_path",
        "device",
        "dtype",
        "hf_device_map",
        "name_or_path",
        "torch_dtype",
        "transformers_version",
    }
)


def plain_attributes(attributes: dict[str, Any], ints: bool) -> dict[str, Any]:
    """Return those of a module's attributes that are plain data, ordered by name; containers as their text, in a tuple.

    `ints` says whether attributes that are an int count. What torch itself keeps in a module does not, but `training`.
    """
    found: dict[str, Any] = {}
    for name in _candidates(tuple(attributes)):
        value = attributes[name]
        kind = type(value)
        if kind in _ATOMS:
            if ints or kind is not int:
                found[name] = value
        elif issubclass(kind, _PLAIN):  # which asks nothing of `value`, whose own lookups may be slow
            found[name] = (plain_text(value),)  # no string is mistaken for a container
    return found


@lru_cache(4096)
def _candidates(names: tuple[str, ...]) -> list[str]:
    return sorted(set(names) - _MACHINERY - _ORIGIN)


def config_text(config: object) -> str:
    """Return the text of a configuration's attributes, and of the configurations among them.

    Names that begin with an underscore do not count, nor does where the model came from.
    """
    return plain_text(config, objects=True)


def type_name(value: object) -> str:
    """Return the full name of the type of `value`."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def plain_text(value: object, inside: tuple[int, ...] = (), objects: bool = False) -> str:
    """Return the text of `value`, which is in the containers with the ids `inside`.

    What is not plain data is told apart by type alone or, with `objects`, by its attributes.
    """
    if type(value) in _ATOMS:
        return repr(value)
    if id(value) in inside:
        return "..."
    within = (*inside, id(value))
    if isinstance(value, dict):
        pairs = [f"{plain_text(key, within)}: {plain_text(entry, within, objects)}" for key, entry in value.items()]
        return f"{{{', '.join(sorted(pairs))}}}"
    if isinstance(value, (list, tuple, set, frozenset)):
        entries = [plain_text(entry, within, objects) for entry in value]
        if isinstance(value, list):
            return f"[{', '.join(entries)}]"
        return f"({', '.join(entries)})" if isinstance(value, tuple) else f"<{', '.join(sorted(entries))}>"
    for atom in (str, int, float):
        if isinstance(value, atom):  # of a subclass, such as an enumeration's
            return atom.__repr__(value)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, Enum):
        return f"{type_name(value)}.{value.name}"
    if objects and hasattr(value, "__dict__") and not callable(value):
        return _object_text(value, within)
    return type_name(value)


def _object_text(value: object, inside: tuple[int, ...]) -> str:
    fields = (
        f"{name!r}: {plain_text(field, inside, objects=True)}"
        for name, field in vars(value).items()
        if not name.startswith("_") and name not in _ORIGIN
    )
    return f"{type_name(value)}({', '.join(sorted(fields))})"
