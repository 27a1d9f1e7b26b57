"""In which layer a fault begins: layer by layer, the same token with a cache and without."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kvcache.verify.decoder import Decoder
from kvcache.verify.judge import Place, relative_error
from kvcache.verify.trial import Step, Uncached

BEFORE_THE_FIRST = -1


class _Recorder:
    """Keeps what goes into the first layer and comes out of each, for one of the forwards that are run."""

    def __init__(self, num_layers: int, wanted: int) -> None:
        self.outputs: list[torch.Tensor | None] = [None] * (num_layers + 1)
        self._wanted = wanted
        self._forward = -1

    def before_first(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forward += 1
        self._keep(0, args[0] if args else next(iter(kwargs.values()), None))

    def after(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._keep(index + 1, output[0] if isinstance(output, tuple) else output)

        return hook

    def _keep(self, index: int, output: Any) -> None:
        if self._forward == self._wanted and isinstance(output, torch.Tensor):
            self.outputs[index] = output.detach().cpu()

    def at(self, index: int, batch_size: int, num_tokens: int, row: int, token: int) -> torch.Tensor | None:
        """Return the output (width,) of one token; tokens may also be packed in one row."""
        output = self.outputs[index]
        if output is None or output.numel() % (batch_size * num_tokens):
            return None
        return output.reshape(batch_size, num_tokens, -1)[row, token]


@contextmanager
def _recording(decoder: Decoder, wanted: int) -> Iterator[_Recorder]:
    layers = decoder.layers()
    recorder = _Recorder(len(layers), wanted)
    hooks = [layers[0].register_forward_pre_hook(recorder.before_first, with_kwargs=True)]
    hooks += [layer.register_forward_hook(recorder.after(index)) for index, layer in enumerate(layers)]
    try:
        yield recorder
    finally:
        for hook in hooks:
            hook.remove()


def first_wrong_layer(decoder: Decoder, run: Callable[[Decoder], list[Step]], place: Place, bound: float) -> int | None:
    """Return the first layer whose output for a token is further off than `bound`, counted from 0.

    `BEFORE_THE_FIRST` if what goes into the first layer is (positions that are added to tokens, for instance); None if
    the decoder's layers are not known, or none is.
    """
    if not decoder.layers():
        return None
    with _recording(decoder, place.step) as cached:
        step = run(decoder)[place.step]
    with _recording(decoder, 0) as uncached:
        Uncached(decoder).run(place.text)
    index = place.token - (len(step.texts[place.row]) - step.num_tokens)
    for number in range(len(decoder.layers()) + 1):
        output = cached.at(number, len(step.texts), step.num_tokens, place.row, index)
        expected = uncached.at(number, 1, len(place.text), 0, place.token)
        if output is not None and expected is not None and not relative_error(output, expected) <= bound:
            return number - 1
    return None
