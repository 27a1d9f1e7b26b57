"""In which layer a fault begins: layer by layer, the same token with a cache and without."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kvcache.verify.decoder import Decoder
from kvcache.verify.judge import Place, relative_error
from kvcache.verify.trial import Step, as_stored

BEFORE_THE_FIRST = -1


def first_wrong_layer(decoder: Decoder, run: Callable[[Decoder], list[Step]], place: Place, bound: float) -> int | None:
    """Return the first layer whose output for a token is further off than `bound`, counted from 0.

    `BEFORE_THE_FIRST` if what goes into the first layer is (positions that are added to tokens, for instance); None if
    the decoder's layers are not known, or none is.
    """
    if not decoder.layers():
        return None
    with _recording(decoder) as uncached:
        as_stored(decoder).run(place.text)
    counted = _Forwards(decoder)
    step = run(counted.decoder)[place.step]
    with _recording(decoder) as cached:
        run(_Forwards(decoder, until=counted.number_of(step), at_end=cached.close).decoder)
    token = place.token - (len(step.texts[place.row]) - step.num_tokens)
    for number, expected in enumerate(uncached.outputs):
        output = cached.outputs[number]
        if output is None or expected is None:
            continue
        width = expected.numel() // len(place.text)
        if output.numel() != len(step.texts) * step.num_tokens * width:
            continue  # of something else than these tokens
        found = output.reshape(len(step.texts), step.num_tokens, width)[place.row, token]
        if not relative_error(found, expected.reshape(-1, width)[place.token]) <= bound:
            return number - 1
    return None


class _Forwards:
    """A decoder whose forwards are counted: some are refused, and of some a scenario keeps no step."""

    def __init__(self, decoder: Decoder, until: int | None = None, at_end: Callable[[], None] | None = None) -> None:
        self.decoder = copy.copy(decoder)
        self.decoder.forward = self._forward  # type: ignore[method-assign]
        self._run = decoder.forward
        self._outputs: list[torch.Tensor | None] = []
        self._until, self._at_end = until, at_end

    def number_of(self, step: Step) -> int:
        """Return the number of the forward whose outputs a step has."""
        addresses = [None if outputs is None else outputs.data_ptr() for outputs in self._outputs]
        return addresses.index(step.outputs.data_ptr())

    def _forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._outputs.append(None)
        outputs = self._run(*args, **kwargs).detach().cpu()
        self._outputs[-1] = outputs
        if self._at_end is not None and len(self._outputs) - 1 == self._until:
            self._at_end()
        return outputs


class _Recorder:
    """Keeps what went into the first layer and came out of each, in the last forward before it is closed."""

    def __init__(self, num_layers: int) -> None:
        self.outputs: list[torch.Tensor | None] = [None] * (num_layers + 1)
        self._is_open = True

    def close(self) -> None:
        self._is_open = False

    def before_first(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._keep(0, args[0] if args else next(iter(kwargs.values()), None))

    def after(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._keep(index + 1, output[0] if isinstance(output, tuple) else output)

        return hook

    def _keep(self, index: int, output: Any) -> None:
        if self._is_open and isinstance(output, torch.Tensor):
            self.outputs[index] = output.detach().cpu()


@contextmanager
def _recording(decoder: Decoder) -> Iterator[_Recorder]:
    layers = decoder.layers()
    recorder = _Recorder(len(layers))
    hooks = [layers[0].register_forward_pre_hook(recorder.before_first, with_kwargs=True)]
    hooks += [layer.register_forward_hook(recorder.after(index)) for index, layer in enumerate(layers)]
    try:
        yield recorder
    finally:
        for hook in hooks:
            hook.remove()
