import pytest
import torch

from tests.hf.tiny_models import FAMILIES, WINDOW, gemma3


@pytest.fixture(scope="module")
def one_thread():
    """On models this small a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def hybrid():
    """Sliding (window 5), sliding, full."""
    return gemma3(window=WINDOW)


@pytest.fixture(scope="module")
def models():
    return {name: make() for name, make in FAMILIES.items()}
