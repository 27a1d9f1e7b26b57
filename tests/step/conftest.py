import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def _jax_has_float64():
    with jax.enable_x64(True):
        yield
