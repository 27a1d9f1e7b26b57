"""How an engine runs its model: through this package's kernels where they know it, else through its forward."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kvcache.decoder.weights import Weights
from kvcache.engine.model import spec_of
from kvcache.errors import NotSupportedError
from kvcache.hf import NativeDecoder, forward_step, use_attention
from kvcache.storage import CacheSpec
from kvcache.storage.step import Step


class Runner:
    """Runs the steps of one model.

    Args:
        model: a transformers decoder.
        weights: as of `NativeDecoder`.

    Attributes:
        spec: of what the model keeps of a token.
        reason: why it is transformers' forward that runs; None where it is not.

    Raises:
        NotSupportedError: the model can run in neither way, or not with these weights, and why.
    """

    def __init__(self, model: Any, weights: Weights | None = None) -> None:
        self._model = model
        self._weights = weights
        self._native: NativeDecoder | None = None
        self.reason: str | None = None
        try:
            self._native = NativeDecoder(model, weights=weights)
        except NotSupportedError as error:
            if weights is not None:
                raise
            self.reason = str(error)
        self.spec = spec_of(model) if self._native is None else CacheSpec.from_config(model.config)

    def __str__(self) -> str:
        if self._native is None:
            return "transformers' forward"
        return "kvcache's own decoder" + ("" if self._weights is None else f", weights in {self._weights}")

    def forward(self, step: Step, places: torch.Tensor | None = None) -> torch.Tensor:
        """As `kvcache.hf.forward_step`."""
        if self._native is not None:
            try:
                return self._native.forward_step(step, places)
            except NotSupportedError as error:
                if self._weights is not None:
                    raise
                self._native, self.reason = None, str(error)
                warnings.warn(
                    f"the model was changed, and goes through transformers' forward from now on: {error}", stacklevel=2
                )
        return forward_step(self._model, step, places)

    def around(self) -> AbstractContextManager[object]:
        """Return what is held while there are steps to run."""
        return nullcontext() if self._native is not None else use_attention(self._model)
