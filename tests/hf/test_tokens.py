import torch

from kvcache.hf.tokens import TokenRecord
from tests.allocations import CountAllocations


def ids(*tokens):
    return torch.tensor([tokens])


def test_what_was_noted_is_read_back():
    record = TokenRecord()
    record.append(ids(1, 2, 3), after=0)
    record.append(ids(4), after=3)
    assert record.first(4).tolist() == [[1, 2, 3, 4]]
    assert record.first(2).tolist() == [[1, 2]]
    assert record.first(5) is None


def test_tokens_after_a_crop_replace_the_old_ones():
    record = TokenRecord()
    record.append(ids(1, 2, 3), after=0)
    record.append(ids(9), after=1)
    assert record.first(2).tolist() == [[1, 9]]
    record.append(ids(7), after=0)
    assert record.first(1).tolist() == [[7]]


def test_a_gap_or_unknown_ids_make_everything_unknown():
    for broken, after in ((None, 2), (ids(3), 5), (torch.ones(1, 2, 3), 2), (torch.ones(2, 1, dtype=torch.int64), 2)):
        record = TokenRecord()
        record.append(ids(1, 2), after=0)
        record.append(broken, after=after)
        assert record.first(1) is None
        record.append(ids(4), after=after + 1)
        assert record.first(1) is None


def test_rows_follow_their_index():
    record = TokenRecord()
    record.append(torch.tensor([[1, 2], [3, 4]]), after=0)
    record.append(torch.tensor([[5], [6]]), after=2)
    record.select(torch.tensor([1, 1, 0]))
    assert record.first(3).tolist() == [[3, 4, 6], [3, 4, 6], [1, 2, 5]]


def test_the_record_is_no_alias_of_the_callers_tensor():
    record, buffer = TokenRecord(), ids(1)
    record.append(buffer, after=0)
    buffer.fill_(9)
    assert record.first(1).tolist() == [[1]]


def test_noting_costs_the_same_however_many_there_are():
    record = TokenRecord()
    record.append(torch.ones(1, 5000, dtype=torch.int64), after=0)
    with CountAllocations() as count:
        for step in range(10):
            record.append(ids(1), after=5000 + step)
    assert count.allocated < 10 * 64
