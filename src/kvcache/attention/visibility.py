"""The one rule that says which stored keys a query may see."""

import torch


def visible_slots(
    num_queries: int,
    num_slots: int,
    *,
    lengths: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    window: int | None = None,
    sinks: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return a boolean mask (B, T, S), with B = 1 where neither `lengths` nor `starts` is given.

    The T queries are the last T of `lengths[b]` valid slots (default: all S), so query t sits at slot
    `lengths[b] - T + t`. It sees the slots from `starts[b]` up to its own; with `window` only the last `window`
    of those, itself included, and the first `sinks` slots from `starts[b]` on.
    """
    slots = torch.arange(num_slots, device=device)  # (S,)
    if lengths is None:
        lengths = torch.tensor([num_slots], device=device)
    last = lengths[:, None] - num_queries + torch.arange(num_queries, device=device)  # (B, T)
    first = torch.zeros_like(lengths[:1]) if starts is None else starts  # (B,)

    visible = (slots <= last[..., None]) & (slots >= first[:, None, None])
    if window is not None:
        in_window = slots > last[..., None] - window
        is_sink = slots < first[:, None, None] + sinks
        visible &= in_window | is_sink
    return visible
