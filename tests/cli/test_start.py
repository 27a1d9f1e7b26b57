import gc
import subprocess
import sys
import time

import pytest

from kvcache.cli.start import Stopwatch, collect_again, process_seconds, rest_collector


@pytest.fixture
def collector():
    """As it was, at the end."""
    yield
    gc.enable()
    gc.unfreeze()


def test_seconds_count_from_the_start_of_the_process():
    code = "import time; time.sleep(0.3); from kvcache.cli.start import process_seconds; print(process_seconds())"
    before = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.3 < float(done.stdout) < time.perf_counter() - before + 0.02  # 10 ms is what Linux tells


def test_stages_add_up_to_the_time_so_far():
    watch = Stopwatch()
    watch.end("imports")
    time.sleep(0.05)
    watch.end("model")
    watch.end("imports")  # which is known already
    assert list(watch.seconds) == ["imports", "model"]
    assert watch.seconds["model"] > 0.03
    assert watch.total == sum(watch.seconds.values())
    assert watch.total == pytest.approx(process_seconds(), abs=5)


def test_the_collector_rests_until_all_is_loaded(collector):
    collect_again()
    assert gc.get_freeze_count() == 0  # it was not resting
    rest_collector()
    assert not gc.isenabled()
    collect_again()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_transformers_looks_through_its_models_once():
    code = (
        "import functools; limited = functools.lru_cache\n"
        "from kvcache.cli.start import import_transformers; import_transformers()\n"
        "from transformers.utils.import_utils import create_import_structure_from_path as look\n"
        "from pathlib import Path; import transformers\n"
        "folders = [path for path in Path(transformers.__file__).parent.glob('models/*') if path.is_dir()]\n"
        "assert functools.lru_cache is limited\n"
        "print(len(folders) > 128, look.cache_info().misses < 1.5 * len(folders))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
