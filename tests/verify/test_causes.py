"""Every planted fault is found, and its cause named."""

import pytest
import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from kvcache.verify import HuggingFaceDecoder, Verdict, verify
from tests.hf.tiny_models import gpt2, llama, mistral
from tests.verify import faulty_caches
from tests.verify.faulty_decoder import FAULTS, FaultyDecoder

pytestmark = pytest.mark.usefixtures("one_thread")

WAYS = [(fault, way) for fault, ways in FAULTS.items() for way in ways]


def causes_found(report):
    return {finding.corruption.cause for finding in report.findings if finding.verdict is Verdict.CORRUPT}


@pytest.mark.parametrize(("fault", "way"), WAYS, ids=[f"{fault}: {way}" for fault, way in WAYS])
def test_a_planted_fault_is_found_and_its_cause_named(fault, way):
    report = verify(FaultyDecoder(fault, way, window=11 if fault == "window bound" else None))
    assert not report.is_right
    assert causes_found(report) == {fault}, str(report)


CACHES = {
    faulty_caches.KeysForValues: "K taken for V",
    faulty_caches.CrossedHeads: "crossed heads",
    faulty_caches.SwappedRows: "rows swapped in a batch",
    faulty_caches.OffsetPositions: "position offset",
    faulty_caches.MisalignedMask: "mask alignment",
    faulty_caches.StaleRows: "stale rows after rollback",
    faulty_caches.WrongWindow: "window bound",
    faulty_caches.UnmaskedTail: "unmasked tail",
    faulty_caches.OverwrittenRows: "overwrite at capacity",
    faulty_caches.FrozenScale: "frozen scale",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("layer_class", "cause"), CACHES.items(), ids=[layer.__name__ for layer in CACHES])
def test_so_it_is_in_a_cache_of_transformers(layer_class, cause, dtype):
    model = (mistral if cause == "window bound" else llama)(dtype)
    decoder = HuggingFaceDecoder(model, faulty_caches.factory(layer_class), is_lossy=cause == "frozen scale")
    report = verify(decoder)
    assert causes_found(report) == {cause}, str(report)


def test_learned_positions_are_told_apart_too():
    report = verify(HuggingFaceDecoder(gpt2(torch.float32), faulty_caches.factory(faulty_caches.OffsetPositions)))
    assert causes_found(report) == {"position offset"}, str(report)
    assert report.findings[0].corruption.layer == -1  # what goes into the first layer is wrong already


def test_a_fault_in_the_last_layer_alone_is_named_and_placed():
    def make(model, max_tokens):
        return Cache(layers=[DynamicLayer(), faulty_caches.KeysForValues()])

    report = verify(HuggingFaceDecoder(llama(torch.float32), make))
    assert causes_found(report) == {"K taken for V"}, str(report)
    assert {finding.corruption.layer for finding in report.findings if finding.corruption} == {1}


def test_heads_that_move_on_by_one_are_crossed_too():
    class Rolled(DynamicLayer):
        def update(self, *args, **kwargs):
            k, v = super().update(*args, **kwargs)
            return k, v.roll(1, 1)

    model = llama(torch.float32, num_key_value_heads=4)
    assert causes_found(verify(HuggingFaceDecoder(model, faulty_caches.factory(Rolled)))) == {"crossed heads"}
