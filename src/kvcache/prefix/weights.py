"""Whether a model would still compute the keys and values that it did before.

`WeightsGuard` answers within one process, cheaply enough to be asked before every look-up in a prefix cache;
`fingerprint` names what a model computes in any process, for what is saved.

The guard looks at every parameter and buffer: which object it is, its address, storage offset, shape, strides, dtype,
device and version, and the values of up to 16 elements spread over it, the first and the last among them. It also looks
at autocast, at the modules (which objects they are, their classes, names and order), their plain attributes
(`plain.py`; adapters are switched by these) except those that are an int, the training flag, forward hooks except this
package's own, and the attributes of each module's `config`. A tensor whose elements cannot be read in place (sparse,
quantised by torch, on the meta device) counts by the rest; a tensor subclass that is made of others counts by those
too.

What can still slip through: a write through `.data` or NumPy, or in place to a tensor made in inference mode, that
changes none of the sampled elements, or is to a dtype of less than a byte; an attribute that is an int, or an object of
another type, such as a tensor that is neither parameter nor buffer; code that is replaced while it runs, such as a
module's `forward`, and global hooks; whatever is changed and changed back between two looks. The fingerprint reads
every byte, and attributes that are an int as well, but neither hooks nor the training flag.
"""

import hashlib
import marshal
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from kvcache.errors import InvalidTypeError
from kvcache.prefix.plain import config_text, plain_attributes, type_name
from kvcache.prefix.tensor_facts import (
    add_field,
    bytes_digest,
    facts_of,
    facts_there_are,
    is_readable,
    parts_of,
    sample_of,
    sample_values,
    serial,
)

_FORMAT = b"1"  # of what a fingerprint is computed from
_BY_VALUE = 2  # the marshal format without references, in which equal values have equal bytes


class WeightsGuard:
    """Tells whether anything that the keys and values of `model` depend on has changed.

    >>> model = torch.nn.Linear(4, 4)
    >>> guard = WeightsGuard(model)
    >>> before = guard.state()
    >>> guard.state() == before
    True
    >>> model.weight.data[0, 0] += 1
    >>> guard.state() == before
    False

    Raises:
        InvalidTypeError: `model` is not a `torch.nn.Module`, or keeps weights packed, as torch's dynamic quantisation
            and TorchScript do.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = _check_module(model)
        self._fingerprint: tuple[bytes, str] | None = None  # and the state that it belongs to

    def state(self) -> bytes:
        """Return 16 bytes that are the same as long as nothing has changed, in this process.

        What is switched off and on again without a change to a tensor has its first state again.
        """
        facts: list[Any] = _autocast()
        samples: defaultdict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
        configs: dict[int, object] = {}
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for module in _modules(self._model):
                held = vars(module)  # torch's own lookups would be much of the time
                facts += serial(module), serial(type(module)), _hooks(held), plain_attributes(held, ints=False)
                for name, child in held["_modules"].items():
                    facts += name, None if child is None else serial(child)
                for name, tensor in (*held["_parameters"].items(), *held["_buffers"].items()):
                    facts.append(name)
                    for part in () if tensor is None else parts_of(tensor):
                        readable = is_readable(part)
                        facts += facts_of(part) if readable else facts_there_are(part)
                        if readable and part.numel() > 0:
                            samples[part.dtype, part.device].append(sample_of(part))
                if "config" in held:
                    configs[id(held["config"])] = held["config"]
            digest = hashlib.blake2b(digest_size=16)
            add_field(digest, "facts", marshal.dumps(facts, _BY_VALUE))
            for config in configs.values():
                add_field(digest, "config", config_text(config).encode())
            for group in samples.values():
                add_field(digest, "samples", sample_values(group))
        return digest.digest()

    def fingerprint(self) -> str:
        """Return `fingerprint(model)`, which is computed again only if `state()` is another than it was."""
        state = self.state()
        if self._fingerprint is None or self._fingerprint[0] != state:
            self._fingerprint = state, fingerprint(self._model)
        return self._fingerprint[1]


def fingerprint(model: nn.Module) -> str:
    """Return 64 hexadecimal digits that name the weights and settings of `model`, the same in every process.

    Raises:
        InvalidTypeError: `model` is not a `torch.nn.Module`, or has weights whose bytes cannot be read.
    """
    model = _check_module(model)
    digest = hashlib.blake2b(digest_size=32)
    add_field(digest, "format", _FORMAT)
    for path, module in sorted(model.named_modules(remove_duplicate=False), key=lambda named: named[0]):
        add_field(digest, "module", path.encode())
        add_field(digest, "class", type_name(module).encode())
        add_field(digest, "children", repr(list(module._modules)).encode())
        attributes = plain_attributes(vars(module), ints=True)
        attributes.pop("training", None)
        add_field(digest, "attributes", repr(attributes).encode())
        if (config := vars(module).get("config")) is not None:
            add_field(digest, "config", config_text(config).encode())
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    contents: dict[int, bytes] = {}  # tied ones are read once
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for name, tensor in sorted(tensors.items()):
            if id(tensor) not in contents:
                contents[id(tensor)] = bytes_digest(name, tensor)
            add_field(digest, "tensor", name.encode())
            add_field(digest, "content", contents[id(tensor)])
    return digest.hexdigest()


def _check_module(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or any(map(_is_packed, vars(module).values())):
            where = f"has {name}, which" if name else "which"
            raise InvalidTypeError(
                f"model {where} is a {type_name(module)} that keeps its weights packed, where they cannot be read; "
                "expected modules with parameters and buffers"
            )
    whole: nn.Module = getattr(model, "_orig_mod", model)  # of what torch.compile returned
    return whole


def _is_packed(value: object) -> bool:
    return isinstance(value, torch.ScriptObject)


def _autocast() -> list[Any]:
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [(torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))) for kind in kinds]


def _modules(model: nn.Module) -> list[nn.Module]:
    found, seen = [model], {id(model)}
    for module in found:  # which grows meanwhile
        for child in vars(module)["_modules"].values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def _hooks(held: dict[str, Any]) -> list[tuple[int, int]]:
    before, after = held["_forward_pre_hooks"], held["_forward_hooks"]
    if not before and not after:
        return []
    return [(number, id(hook)) for number, hook in (*before.items(), *after.items()) if not is_own_hook(hook)]


def is_own_hook(hook: Any) -> bool:
    """Whether a module's hook is one of this package, which come and go with caches and change no key or value."""
    return (getattr(hook, "__module__", None) or "").startswith("kvcache.")
