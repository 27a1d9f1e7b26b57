from typing import Any

import pytest
from hypothesis import settings

# A shared machine may stall at any example.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The default model in float32 and its tokenizer; fetched and converted on the first run on a machine."""
    from kvcache.hf import load_model

    return load_model("smollm2")
