"""The layers of a step of a `BlockPool`, as transformers' models see them: a cache that takes rows and gives none back.

What a model gets for its keys, values and mask are deferred tensors that stand for rows of many sequences in blocks.
Attention asks the step about them; they have no content, and anything else that a model does with one is refused.
"""

from typing import Any, NamedTuple, NoReturn, Unpack

import torch
from transformers.cache_utils import CacheLayerMixin

from kvcache.attention.arguments import ScoreOptions
from kvcache.errors import NotSupportedError
from kvcache.hf.deferred import Deferred, source_of
from kvcache.storage.step import Step


class StepRows(NamedTuple):
    """The keys (part 0) or values (part 1) that a step's queries may see in one layer, in the blocks of its pool."""

    step: Step
    layer: int
    part: int

    def check(self, value: torch.Tensor, mask: Any, window: int | None, others: set[str]) -> None:
        """Check that attention with these keys is the step's own.

        Args:
            value: what came to attention with the keys; expected the same layer's values.
            mask: expected `mask_of_step` of the same step.
            window: what the layer asks for; None where it leaves that to its mask.
            others: names of what else it asks for; expected none.

        Raises:
            NotSupportedError: it is not.
        """
        own_window = self.step.pool.spec.layers[self.layer].window
        if source_of(mask, Step) is not self.step:
            others = others | {"a mask of its own"}
        if window not in (None, own_window):
            others = others | {f"a window of {window} (the pool's layer has {own_window})"}
        if self.part != 0 or source_of(value, StepRows) != self._replace(part=1):
            others = others | {"keys and values other than its own"}
        if others:
            _refuse(f"layer {self.layer} attends with {', '.join(sorted(others))}")

    def attend(self, query: torch.Tensor, **options: Unpack[ScoreOptions]) -> torch.Tensor:
        """Attend the queries (1, H, N, D) of all new tokens, each over its own sequence."""
        return self.step.attend(self.layer, query, **options)

    def refuse(self) -> NoReturn:
        """Raise `NotSupportedError`: the rows of many sequences are no tensor."""
        _refuse(f"layer {self.layer} does something with its keys and values between the cache and attention")


class StepLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a step, to which the model gives the keys and values of all new tokens."""

    def __init__(self, step: Step, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step, self.index = step, index
        self.is_sliding = step.pool.spec.layers[index].window is not None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys (1, Hkv, N, D) and values (1, Hkv, N, Dv); return what stands for all that their queries see.

        Raises:
            InvalidValueError, InvalidTypeError: as `Step.append`.
        """
        self.step.append(self.index, key_states, value_states)
        return self._deferred(0, key_states), self._deferred(1, value_states)

    def _deferred(self, part: int, new: torch.Tensor) -> torch.Tensor:
        rows = StepRows(self.step, self.index, part)
        return Deferred.of(tuple(new.shape), new.dtype, new.device, rows, rows.refuse)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the blocks are there."""

    def get_max_length(self) -> int:
        """Return -1: sequences grow as long as their pool has blocks."""
        return -1

    def get_seq_length(self) -> int:
        """Refuse: the sequences have a length each."""
        _refuse("it asks its cache for the length of the text")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Refuse: the sequences have a length each."""
        _refuse("it makes a mask of its own")


def mask_of_step(step: Step) -> torch.Tensor:
    """Return what stands for the step's own rule, as a mask (1, 1, N, N), which models hand to attention as it is."""
    num_tokens = sum(step.num_tokens)

    def refuse() -> NoReturn:
        _refuse("it does something with its attention mask")

    return Deferred.of((1, 1, num_tokens, num_tokens), torch.bool, step.pool.device, step, refuse)


def _refuse(what: str) -> NoReturn:
    raise NotSupportedError(
        f"the model cannot run over a step of a pool: {what}; use cache_for(model), which serves such models too"
    )
