from typing import Any

import pytest


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The default model in float32 and its tokenizer; fetched and converted on the first run on a machine."""
    from kvcache.hf import load_model

    return load_model("smollm2")
