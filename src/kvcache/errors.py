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


class RollbackError(KVCacheError, ValueError):
    """A window no longer holds the rows that the shorter sequence needs; nothing was removed."""


class ModelError(KVCacheError, OSError):
    """A model could not be found, fetched, checked or loaded."""
