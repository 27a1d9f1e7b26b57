"""Every planted fault is found, and its cause named."""

import pytest
import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvcache.verify import HuggingFaceDecoder, Verdict, verify
from tests.hf.tiny_models import gpt2, llama, mistral, mixtral
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


class LearnedPositions(FaultyDecoder):
    """Positions are added to the tokens, one too far when decoding."""

    def __init__(self):
        super().__init__()
        self.module.positions = torch.nn.Embedding(64, 32)

    def _run(self, tokens, cache, padding):
        past = 0 if cache is None else cache.length
        padding = torch.zeros(len(tokens), dtype=torch.int64) if padding is None else padding
        positions = past + torch.arange(tokens.shape[1]) - padding[:, None] + (past > 0)
        added = self.module.positions(positions.clamp(0, 63))
        hook = self.module.embedding.register_forward_hook(lambda module, args, output: output + added)
        try:
            return super()._run(tokens, cache, padding)
        finally:
            hook.remove()


def test_learned_positions_of_a_decoder_of_ones_own_are_told_by_the_layer():
    report = verify(LearnedPositions())
    assert causes_found(report) == {"position offset"}, str(report)


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


def cropped_for_the_first_row_only(layer, tokens_to_remove):
    k, v = layer.keys.clone(), layer.values.clone()
    DynamicLayer.crop(layer, tokens_to_remove)
    length = layer.keys.shape[2]
    layer.keys[1:], layer.values[1:] = k[1:, :, -length:], v[1:, :, -length:]


class FirstRowCropped(DynamicLayer):
    crop = cropped_for_the_first_row_only


class FirstRowSaved(DynamicLayer):
    def __reduce__(self):
        rows = self.keys[:1].expand_as(self.keys).clone(), self.values[:1].expand_as(self.values).clone()
        return _layer_of, rows


def _layer_of(k, v):
    layer = DynamicLayer()
    layer.update(k, v)
    return layer


class FlippedCopy(DynamicLayer):
    def __deepcopy__(self, memo):
        return _layer_of(self.keys.flip(0), self.values.flip(0))


@pytest.mark.parametrize(
    ("layer_class", "scenarios"),
    [
        (FirstRowCropped, ["rollback and retry"]),
        (FirstRowSaved, ["fork", "save and restore"]),  # a deep copy goes the same way
        (FlippedCopy, ["fork"]),
    ],
)
def test_a_fault_in_a_later_row_of_the_batch_is_found_and_no_cause_made_up(layer_class, scenarios):
    report = verify(HuggingFaceDecoder(llama(torch.float32), faulty_caches.factory(layer_class)))
    corrupt = {finding.scenario: finding.corruption for finding in report.findings if finding.corruption}
    assert list(corrupt) == scenarios, str(report)
    assert {corruption.cause for corruption in corrupt.values()} <= {None, "stale rows after rollback"}


def test_beams_that_are_reordered_the_wrong_way_round_are_swapped():
    class Inverse(DynamicLayer):
        def reorder_cache(self, beam_idx):
            super().reorder_cache(beam_idx.argsort())

    report = verify(HuggingFaceDecoder(llama(torch.float32), faulty_caches.factory(Inverse)))
    assert causes_found(report) == {"rows swapped in a batch"}, str(report)


@pytest.mark.parametrize(("window", "kept"), [(4, 3), (5, 3), (6, 3), (9, 8)])
def test_windows_of_any_length_are_told(window, kept):
    class Short(DynamicSlidingWindowLayer):
        def __init__(self, sliding_window):
            super().__init__(kept)

    report = verify(HuggingFaceDecoder(mistral(torch.float32, window=window), faulty_caches.factory(Short)))
    assert causes_found(report) == {"window bound"}, str(report)


@pytest.mark.parametrize(("make_model", "seed"), [(llama, 1), (llama, 4), (mixtral, 0), (mixtral, 1)])
def test_a_right_lossy_cache_of_ones_own_gives_no_alarm(make_model, seed):
    report = verify(
        HuggingFaceDecoder(
            make_model(torch.bfloat16, seed), faulty_caches.factory(faulty_caches.RoundedRows), is_lossy=True
        ),
        seed=seed,
    )
    assert report.is_right, str(report)
