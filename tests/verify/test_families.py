"""No false alarm, on any family of models."""

import pytest
import torch

from kvcache.verify import HuggingFaceDecoder, Verdict, verify
from tests.hf.tiny_models import ALL_FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_right_cache_gives_no_alarm(family, dtype):
    report = verify(HuggingFaceDecoder(ALL_FAMILIES[family](dtype)))
    assert report.is_right, str(report)
    verdicts = {finding.scenario: finding.verdict for finding in report.findings}
    has_window = family in ("mistral", "gemma3", "qwen2", "gemma2", "phi3", "gpt_oss")
    assert [name for name, verdict in verdicts.items() if verdict is Verdict.NOT_RUN] == (
        [] if has_window else ["window wrap-around"]
    )


@pytest.mark.filterwarnings("ignore:the model does something")
@pytest.mark.parametrize("storage", [None, "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_nor_does_attention_from_the_store(family, storage):
    report = verify(HuggingFaceDecoder(ALL_FAMILIES[family](torch.float32), storage=storage, attention=True))
    assert report.is_right, str(report)
    lossy = [finding for finding in report.findings if finding.verdict is Verdict.LOSSY]
    assert len(lossy) == (0 if storage is None else 11 if family != "llama" else 10)
    assert all(finding.loss.top1_agreement > 0.5 for finding in lossy)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_transformers_own_caches_are_right_but_for_what_they_do_when_full(cache):
    report = verify(HuggingFaceDecoder(ALL_FAMILIES["llama"](torch.float32), cache))
    failures = [finding.scenario for finding in report.findings if finding.verdict.is_failure]
    assert failures == (["full cache"] if cache == "static" else []), str(report)
    assert report.findings[-2].verdict is (Verdict.ERROR if cache == "static" else Verdict.ROUNDING)
