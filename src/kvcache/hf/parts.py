"""The modules and tensors of a model that something else goes by, and whether they are still the same ones."""

from typing import Any

import torch
from torch import nn

from kvcache import native
from kvcache.errors import NotSupportedError
from kvcache.prefix.weights import is_own_hook

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class Parts:
    """Parts of a model, noted as they are read.

    What is done to a tensor's numbers is no change: who goes by a part reads its memory anew each time.

    Attributes:
        tensors: by their path in the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._model = model
        self._facts: list[object] = []  # of the tensors
        self._holders: list[dict[str, Any]] = []  # where each part stands
        self._names: list[str] = []  # its name there
        self._parts: list[Any] = []
        self._attributes: list[dict[str, Any]] = []  # of the modules
        self._hooks: list[dict[int, Any]] = []  # of those below the model
        self._model_hooks = [vars(model)[name] for name in _HOOKS]

    def module(self, module: nn.Module, path: str, classes: tuple[str, ...] | None) -> nn.Module:
        """Note a module that nobody has put something around, of one of these classes of the model's own file.

        Raises:
            NotSupportedError: it is otherwise.
        """
        where = path or "the model"
        if classes is not None and (
            type(module).__name__ not in classes or type(module).__module__ != type(self._model).__module__
        ):
            raise NotSupportedError(f"{where} is a {type(module).__name__}; expected {' or '.join(classes)}")
        if "forward" in vars(module):
            raise NotSupportedError(f"{where} has a forward of its own")
        hooks = [vars(module)[name] for name in _HOOKS]
        if _are_around(hooks):
            raise NotSupportedError(f"{where} has forward hooks")
        self._attributes.append(vars(module))
        if module is not self._model:
            self._hooks += hooks
        return module

    def child(self, owner: nn.Module, path: str, name: str, classes: tuple[str, ...] | None = None) -> nn.Module:
        """Note and return a module's child, as `module` does."""
        where = f"{path}.{name}".lstrip(".")
        child = owner._modules.get(name)
        if child is None:
            raise NotSupportedError(f"the model has no {where}")
        self._note(owner._modules, name, child)
        return self.module(child, where, classes)

    def own(self, path: str, classes: tuple[str, ...]) -> nn.Module:
        """Note and return a child of the model itself."""
        return self.child(self._model, "", path, classes)

    def tensor(self, owner: nn.Module, path: str, name: str) -> torch.Tensor:
        """Note a parameter or buffer of a module, and return one that keeps its memory whatever becomes of the first.

        Raises:
            NotSupportedError: it has no memory of its own, as on the meta device or a tensor subclass.
        """
        held = owner._parameters if name in owner._parameters else owner._buffers
        tensor, where = held.get(name), f"{path}.{name}"
        if tensor is None:
            raise NotSupportedError(f"the model has no {where}")
        if type(tensor) not in native.PLAIN_TYPES or tensor.is_meta or tensor.layout is not torch.strided:
            raise NotSupportedError(f"{where} is a {type(tensor).__name__} on {tensor.device}; expected a plain tensor")
        self._note(held, name, tensor)
        self.tensors[where] = tensor
        self._facts.append(_facts_of(where, tensor))
        return tensor.detach()

    def attribute(self, owner: nn.Module, name: str) -> Any:
        """Note and return an attribute of a module, or None where it has none of this name."""
        value = vars(owner).get(name)
        if name in vars(owner):
            self._note(vars(owner), name, value)
        return value

    def no_tensor(self, owner: nn.Module, name: str) -> None:
        """Note that a module has no parameter of this name."""
        self._note(owner._parameters, name, None)

    @property
    def are_the_same(self) -> bool:
        """Whether all parts are still in their places, with nothing around them."""
        assert native.kernels is not None  # whose loops are fast
        return (
            native.kernels.are_in_place(self._holders, self._names, self._parts, self._attributes, "forward")
            and list(map(_facts_of, self.tensors, self.tensors.values())) == self._facts
            and not any(self._hooks)
            and not _are_around(self._model_hooks)
        )

    @property
    def versions(self) -> list[int]:
        """How often each tensor was written, as far as PyTorch knows."""
        return [0 if tensor.is_inference() else tensor._version for tensor in self.tensors.values()]

    def _note(self, holder: dict[str, Any], name: str, part: Any) -> None:
        self._holders.append(holder)
        self._names.append(name)
        self._parts.append(part)


def _are_around(hooks: list[dict[int, Any]]) -> bool:
    return any(not is_own_hook(hook) for some in hooks for hook in some.values())


def _facts_of(where: str, tensor: torch.Tensor) -> object:
    """Return where the numbers of a tensor are; of one that is read only once, how often it was written as well."""
    is_read_once = where.rpartition(".")[2] not in ("weight", "bias") and not tensor.is_inference()
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, is_read_once and tensor._version
