"""Caches of transformers with one fault each, as factories for `HuggingFaceDecoder`."""

from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from kvcache.storage.model_config import decoder_config, layer_windows


class KeysForValues(DynamicLayer):
    def update(self, *args, **kwargs):
        k, _ = super().update(*args, **kwargs)
        return k, k


class CrossedHeads(DynamicLayer):
    def update(self, *args, **kwargs):
        k, v = super().update(*args, **kwargs)
        return k, v.flip(1)


class SwappedRows(DynamicLayer):
    def reorder_cache(self, beam_idx):
        pass


class OffsetPositions(DynamicLayer):
    def get_seq_length(self):
        length = super().get_seq_length()
        return length + 1 if length else 0

    def get_mask_sizes(self, query_length):
        return super().get_seq_length() + query_length, 0


class MisalignedMask(DynamicLayer):
    def get_mask_sizes(self, query_length):
        length = self.get_seq_length()
        return length + query_length, 1 if length else 0


class StaleRows(DynamicLayer):
    def crop(self, tokens_to_remove):
        pass


class WrongWindow(DynamicSlidingWindowLayer):
    def __init__(self, sliding_window):
        super().__init__(sliding_window - 1)


class UnmaskedTail(StaticLayer):
    is_compileable = False  # so that masks are left out for one token


class OverwrittenRows(StaticLayer):
    def update(self, key_states, value_states, *args, **kwargs):
        if self.is_initialized and self.cumulative_length + key_states.shape[2] > self.max_cache_len:
            self.cumulative_length.fill_(self.max_cache_len - key_states.shape[2])
        return super().update(key_states, value_states, *args, **kwargs)


class RoundedRows(DynamicLayer):
    """Right: each row is rounded to 8 bits by itself."""

    def update(self, key_states, value_states, *args, **kwargs):
        rounded = []
        for rows in (key_states, value_states):
            scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
            rounded.append((rows / scale).round() * scale)
        return super().update(*rounded, *args, **kwargs)


class FrozenScale(DynamicLayer):
    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.scales = [rows.abs().amax() / 127 for rows in (key_states, value_states)]
        rounded = [
            (rows / scale).round().clamp(-127, 127) * scale
            for rows, scale in zip((key_states, value_states), self.scales, strict=True)
        ]
        return super().update(*rounded, *args, **kwargs)


def factory(layer_class):
    """Return a factory of caches whose layers are all of this class."""

    def make(model, max_tokens):
        windows = layer_windows(decoder_config(model.config))
        if issubclass(layer_class, StaticLayer):
            return Cache(layers=[layer_class(max_tokens) for _ in windows])
        if issubclass(layer_class, DynamicSlidingWindowLayer):
            return Cache(layers=[layer_class(window) for window in windows])
        return Cache(layers=[layer_class() for _ in windows])

    return make


def raises(model, max_tokens):
    raise RuntimeError("no luck")


def of_one_argument(model):
    return Cache(layers=[])


def not_a_cache(model, max_tokens):
    return {}


NOT_A_FUNCTION = 3


crossed_heads = factory(CrossedHeads)
