import signal
from typing import Any

import pytest
import torch
from hypothesis import settings

from kvcache import native
from kvcache.attention import cpu
from kvcache.storage import native_append
from tests.kernels import INSTRUCTION_SETS

# A shared machine may stall at any example.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(autouse=True, scope="session")
def interrupts():
    """Let Ctrl-C interrupt, though a shell that starts a run in the background has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The default model in float32 and its tokenizer; fetched and converted on the first run on a machine."""
    from kvcache.hf import load_model

    return load_model("smollm2")


@pytest.fixture(scope="module")
def one_thread():
    """On models this small a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=range(len(INSTRUCTION_SETS)), ids=INSTRUCTION_SETS)
def instruction_set(request, monkeypatch) -> None:
    """Each set of instructions in turn, where there are kernels."""
    for module in (cpu, native_append):
        monkeypatch.setattr(module, "BEST", request.param)


@pytest.fixture
def no_kernels(monkeypatch) -> Any:
    """The package as it is where no kernels were built."""
    monkeypatch.setattr(native, "kernels", None)
    native.warn_that_kernels_are_missing.cache_clear()
    yield
    native.warn_that_kernels_are_missing.cache_clear()
