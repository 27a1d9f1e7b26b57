"""Every exception that a user can meet.

Each is a `KVCacheError` and also the built-in exception that a PyTorch user expects in its place,
so both `except KVCacheError` and `except ValueError` work.
"""


class KVCacheError(Exception):
    """Base of all exceptions of this package."""


class InvalidValueError(KVCacheError, ValueError):
    """An argument has the right type but a wrong shape, size, device or value."""


class InvalidTypeError(KVCacheError, TypeError):
    """An argument has the wrong type or dtype."""


class CacheFullError(KVCacheError, ValueError):
    """More tokens were to be stored than the cache has room for; nothing was stored."""


class OutOfBlocksError(CacheFullError):
    """A pool has fewer blocks to give than a step needs; nothing has changed.

    Attributes: `kind` of the layers whose blocks are short, blocks `needed`, and blocks `available`: free ones,
    and those that only a `PrefixCache` holds.
    """

    def __init__(self, kind: str, needed: int, available: int) -> None:
        super().__init__(kind, needed, available)
        self.kind, self.needed, self.available = kind, needed, available

    def __str__(self) -> str:
        return (
            f"blocks of the {self.kind} layers: {self.needed} needed for the step, {self.available} available; free "
            f"sequences, step fewer tokens at once, or create the pool with num_blocks larger by "
            f"{self.needed - self.available}"
        )


class RollbackError(KVCacheError, ValueError):
    """A window no longer holds the rows that the shorter sequence needs; nothing was removed."""


class ModelError(KVCacheError, OSError):
    """A model could not be found, fetched, checked or loaded."""


class EngineClosedError(KVCacheError, RuntimeError):
    """An engine is closed, or was before a request had ended."""


class NotSupportedError(KVCacheError, NotImplementedError):
    """A model, or its cache, cannot do what is asked for; `kvcache.verify` lists such a scenario as not run."""
