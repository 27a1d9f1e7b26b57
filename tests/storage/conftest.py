import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors here are tiny: starting threads for them takes longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
