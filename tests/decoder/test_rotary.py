"""Tables of positions: one half of a head, grown as texts grow, never beyond what the model allows."""

import torch

from kvcache.decoder.rotary import RotaryTables
from tests.decoder.random_decoders import turns


class Counted:
    """A rotary function that keeps which positions it was asked for."""

    def __init__(self, head_dim=8):
        self.asked = []
        self._turns = turns(10000.0, head_dim)

    def __call__(self, positions):
        self.asked.append((int(positions[0]), len(positions)))
        return self._turns(positions)


def test_a_table_holds_one_half_of_what_turns_a_head():
    tables = RotaryTables({"all": turns(10000.0, 8)}, None).upto(5)
    cos, sin = tables["all"]
    frequencies = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angles = torch.arange(len(cos), dtype=torch.float64)[:, None] * frequencies
    assert (cos.dtype, cos.shape[1], cos.is_contiguous(), sin.is_contiguous()) == (torch.float32, 4, True, True)
    assert torch.equal(cos, angles.cos().float())
    assert torch.equal(sin, angles.sin().float())


def test_tables_are_made_once_and_doubled_when_texts_outgrow_them():
    rotary = Counted()
    tables = RotaryTables({"all": rotary}, None)
    for length in (1, 1024, 1025, 2048, 5000, 3):
        assert len(tables.upto(length)["all"].cos) >= length
    assert rotary.asked == [(0, 1024), (0, 2048), (0, 5000)]


def test_no_position_is_asked_for_that_the_model_does_not_allow():
    rotary = Counted()
    tables = RotaryTables({"all": rotary}, 1500)
    for length in (10, 1200, 1500):
        tables.upto(length)
    assert rotary.asked == [(0, 1024), (0, 1500)]
    few = Counted()
    RotaryTables({"all": few}, 16).upto(3)
    assert few.asked == [(0, 16)]


def test_all_kinds_of_positions_grow_together():
    rotary = {"full": Counted(8), "sliding": Counted(6)}
    tables = RotaryTables(rotary, None).upto(1025)
    assert {name: tuple(table.cos.shape) for name, table in tables.items()} == {"full": (1025, 4), "sliding": (1025, 3)}


def test_tables_made_in_inference_mode_are_of_use_outside_of_it():
    with torch.inference_mode():
        tables = RotaryTables({"all": turns(10000.0, 8)}, None).upto(4)
    assert not tables["all"].cos.is_inference()
    assert not tables["all"].cos.requires_grad
