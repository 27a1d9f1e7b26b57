"""Nothing is found that was computed for another namespace, other weights, or tokens that stand for something else."""

import hashlib
import os
import random
import subprocess
import sys

import pytest
import torch

from kvcache import CacheSpec, InvalidTypeError, InvalidValueError, LayerSpec
from kvcache.prefix import LookupEnd, Media, keys
from tests.prefix.runs import kept_blocks, new_cache, run, start, store
from tests.storage.pools import FULL, MIXED, append_layers, check_extend

PROMPT = list(range(1, 11))
NAMESPACES = [
    None,
    "X",
    {"adapter": "X"},
    {"salt": "X"},
    {"image": "X"},
    {"adapter": b"X"},
    ("ab", "c"),
    ("a", "bc"),
    ("a", ("b", "c")),
    {"a": "b", "c": "d"},
    {"a": {"b": "c"}},
    {"rope": {"type": "linear", "factor": 2.0}},
    {"rope": {"type": "linear", "factor": 4.0}},
    0,
    0.0,
    -0.0,
    -1,
    10**5000,
    False,
    1,
    True,
    "",
    (),
    {},
]
HOLDS_ITSELF: list = []
HOLDS_ITSELF.append(HOLDS_ITSELF)


def test_f2_namespaces_do_not_share_and_each_finds_its_own():
    prefixes = new_cache(num_blocks=4 * len(NAMESPACES))
    assert [run(prefixes, PROMPT, namespace) for namespace in NAMESPACES] == [0] * len(NAMESPACES)
    assert [run(prefixes, PROMPT, namespace) for namespace in NAMESPACES] == [9] * len(NAMESPACES)


def test_equal_namespaces_are_one_however_they_are_written():
    prefixes = new_cache()
    run(prefixes, PROMPT, {"adapter": "X", "salts": [1, 2]})
    assert run(prefixes, PROMPT, {"salts": (1, 2), "adapter": "X"}) == 9


@pytest.mark.parametrize(
    ("namespace", "message"),
    [
        (object(), "namespace is a object; expected plain data"),
        ({"adapter": {1, 2}}, r"namespace\['adapter'\] is a set; expected plain data"),
        (["a", torch.zeros(1)], r"namespace\[1\] is a Tensor; expected plain data"),
        ({(1, object()): 2}, r"a key of namespace\[1\] is a object"),
        (HOLDS_ITSELF, "namespace is nested too deeply, or holds itself"),
    ],
)
def test_a_namespace_that_cannot_be_hashed_is_refused(namespace, message):
    prefixes = new_cache()
    for act in (prefixes.acquire, prefixes.lookup, prefixes.keys):
        with pytest.raises((InvalidTypeError, InvalidValueError), match=message):
            act(PROMPT, namespace)
    with pytest.raises((InvalidTypeError, InvalidValueError), match=message):
        prefixes.invalidate(namespace)


def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


def optimiser_step(model):
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimiser.step()


@torch.no_grad()
def copied(model):
    model[1].weight.copy_(torch.ones(4, 4))


def written_through_data(model):
    model[0].bias.data += 1


def loaded(model):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def to_bfloat16(model):
    model.to(torch.bfloat16)


@pytest.mark.parametrize("change", [optimiser_step, copied, written_through_data, loaded, to_bfloat16])
def test_what_other_weights_computed_is_not_found(change):
    model = small_model()
    prefixes = new_cache(model=model)
    assert [run(prefixes, PROMPT) for _ in range(2)] == [0, 9]
    change(model)
    assert prefixes.lookup(PROMPT).end is LookupEnd.NOTHING_KEPT
    assert [run(prefixes, PROMPT) for _ in range(2)] == [0, 9]


def test_an_adapter_switched_off_and_on_again_finds_what_it_computed():
    model = small_model()
    model[0].adapter_enabled = True
    prefixes = new_cache(model=model)
    assert run(prefixes, PROMPT) == 0
    model[0].adapter_enabled = False
    assert [run(prefixes, PROMPT) for _ in range(2)] == [0, 9]
    model[0].adapter_enabled = True
    assert run(prefixes, PROMPT) == 9


def test_a_sequence_that_outlives_its_weights_shares_nothing_more():
    model = small_model()
    prefixes = new_cache(model=model)
    sequence, _ = start(prefixes, PROMPT[:5])
    copied(model)
    check_extend(prefixes.pool, {sequence: PROMPT[5:]})
    assert prefixes.publish(sequence) == 0
    assert prefixes.publish(sequence.fork()) == 0
    assert len(kept_blocks(prefixes)) == 1
    assert prefixes.lookup(PROMPT).num_tokens == 0


def test_weights_that_changed_within_a_block_and_back_are_seen_by_any_look_between():
    model = small_model()
    model[0].adapter_enabled = True
    prefixes = new_cache(model=model)
    sequence, _ = start(prefixes, PROMPT[:2])
    model[0].adapter_enabled = False
    start(prefixes, [50, 51])
    check_extend(prefixes.pool, {sequence: PROMPT[2:3]})
    model[0].adapter_enabled = True
    check_extend(prefixes.pool, {sequence: PROMPT[3:]})
    assert prefixes.publish(sequence) == 0
    assert prefixes.lookup(PROMPT).num_tokens == 0


def test_a_commit_does_not_fail_where_the_look_at_the_weights_does(monkeypatch):
    model = small_model()
    prefixes = new_cache(model=model)
    sequence, _ = start(prefixes, PROMPT[:3])
    with monkeypatch.context() as broken:
        broken.setattr(prefixes._guard, "state", lambda: 1 / 0)
        check_extend(prefixes.pool, {sequence: PROMPT[3:]})
        with pytest.raises(ZeroDivisionError):
            prefixes.acquire(PROMPT)
    assert prefixes.publish(sequence) == 0


def test_keys_tell_apart_all_that_rows_depend_on():
    torch.manual_seed(0)
    other = small_model()
    copied(other)
    wide = CacheSpec([LayerSpec(num_heads=2, head_dim=8)])
    medium, other_medium = Media(2, 5, b"one"), Media(2, 5, b"other")
    caches = [
        new_cache(),
        new_cache(spec=FULL),
        new_cache(spec=wide),
        new_cache(storage="float32"),
        new_cache(storage="int8"),
        new_cache(block_size=2),
        new_cache(model=small_model()),
        new_cache(model=other),
    ]
    found = [cache.keys(PROMPT) for cache in caches]
    found += [caches[0].keys(PROMPT, namespace) for namespace in NAMESPACES[1:]]
    found += [caches[0].keys(PROMPT, media=[medium]), caches[0].keys(PROMPT, media=[other_medium])]
    every = [key for of_text in found for key in of_text]
    assert len(every) == len(set(every))
    assert {len(key) for key in every} == {32}
    assert new_cache(model=small_model()).keys(PROMPT) == caches[6].keys(PROMPT)


def test_keys_are_those_of_whole_blocks_and_depend_on_all_tokens_before():
    prefixes = new_cache()
    found = prefixes.keys(PROMPT)
    assert len(found) == 2
    assert prefixes.keys(PROMPT[:8]) == found
    assert prefixes.keys([*PROMPT[:4], 0, 0, 0, 0])[0] == found[0]
    assert prefixes.keys([0, *PROMPT[1:]])[1] != found[1]
    assert prefixes.keys([1, 2, 3]) == []


@pytest.mark.parametrize("seed", ["0", "1", "12345"])
def test_f21_and_h1_keys_are_equal_in_every_process(seed):
    program = (
        "import torch; from kvcache import *; from kvcache.prefix import *; torch.manual_seed(3);"
        "pool = BlockPool(CacheSpec([LayerSpec(2, 4)]), 8, 4, 'int8');"
        "prefixes = PrefixCache(pool, torch.nn.Linear(3, 3));"
        "print([key.hex() for key in prefixes.keys(range(9), {'adapter': None, 'salt': 'x', 'n': 1.5})])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    torch.manual_seed(3)
    prefixes = new_cache(spec=CacheSpec([LayerSpec(2, 4)]), storage="int8", model=torch.nn.Linear(3, 3))
    expected = prefixes.keys(range(9), {"adapter": None, "salt": "x", "n": 1.5})
    assert output.stdout.strip() == str([key.hex() for key in expected])


def test_the_format_of_keys_stays():
    # What was written down under these keys stays valid as long as they do; else FORMAT has to change with them.
    root = keys.root_key(keys.encoded("namespace", {"salt": "x"}))
    assert root.hex() == "1912ed106f048613ab02fac11bee0d82f000b5590a3ebb457c6e0c1ada31e24b"
    assert keys.block_key(root, bytes(32)).hex() == "9326543331d98d086d4f81c7d2a664f71c6fc8ca625cf52342915760cdd2e9af"


def test_f1_a_hash_that_is_always_the_same_changes_nothing(monkeypatch):
    monkeypatch.setattr(keys, "digest", lambda data: b"same")
    prefixes = new_cache(num_blocks=80)
    texts = [[1, 2, 1, 2, 1, 2, 1, 2, 1, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [1, 2, 3, 4, 1, 2, 3, 4, 1]]
    assert {*prefixes.keys(texts[0]), *prefixes.keys(texts[1])} == {b"same"}
    assert [run(prefixes, text, "x") for text in texts] == [0, 2, 0, 4]
    assert [run(prefixes, text) for text in texts] == [0, 2, 0, 4]
    assert [run(prefixes, text, "x") for text in texts] == [9, 8, 4, 8]


def media_digest(*content):
    return hashlib.sha256(repr(content).encode()).digest()


def test_f5_the_same_tokens_for_another_image_are_not_reused_from_the_image_on():
    prefixes = new_cache()
    text = [1, 2, 9, 9, 9, 9, 9, 3, 4, 5, 6]
    one, other = Media(2, 7, media_digest(1)), Media(2, 7, media_digest(2))
    assert run(prefixes, text, media=[one]) == 0
    assert run(prefixes, text, media=[other]) == 2
    assert run(prefixes, text) == 2
    assert [run(prefixes, text, media=media) for media in ([one], [other], [])] == [10, 10, 10]


def test_f5_digests_that_differ_in_one_bit_anywhere_are_others():
    prefixes = new_cache(num_blocks=600)
    text = [9, 9, 9, 9, 1, 2]
    digests = [(1 << bit).to_bytes(32, "big") for bit in range(256)]
    assert {store(prefixes, text, media=[Media(0, 4, digest)]) for digest in digests} == {0}
    assert {store(prefixes, text, media=[Media(0, 4, digest)]) for digest in digests} == {5}


def test_f5_a_thousand_random_digests_do_not_meet():
    prefixes = new_cache(spec=FULL, num_blocks=2500)
    rng = random.Random(0)
    text = [7, 9, 9, 9, 9, 8]
    digests = [rng.randbytes(32) for _ in range(1000)]
    assert {store(prefixes, text, media=[Media(1, 5, digest)]) for digest in digests[:1]} == {0}
    assert {store(prefixes, text, media=[Media(1, 5, digest)]) for digest in digests[1:]} == {1}
    assert {prefixes.lookup(text, media=[Media(1, 5, digest)]).num_tokens for digest in digests} == {5}


@pytest.mark.parametrize(
    ("start_of_other", "stop_of_other", "reused"), [(2, 7, 10), (1, 6, 1), (3, 8, 2), (2, 6, 6), (2, 8, 7)]
)
def test_f5_the_place_in_an_image_counts(start_of_other, stop_of_other, reused):
    prefixes = new_cache()
    text = [9] * 11
    run(prefixes, text, media=[Media(2, 7, b"image")])
    assert run(prefixes, text, media=[Media(start_of_other, stop_of_other, b"image")]) == reused


def test_f5_the_second_of_two_images_counts_too():
    prefixes = new_cache()
    text = [1, 9, 9, 2, 9, 9, 3, 4]
    first, second, third = Media(1, 3, b"first"), Media(4, 6, b"second"), Media(4, 6, b"third")
    run(prefixes, text, media=[second, first])
    assert run(prefixes, text, media=[first, second]) == 7
    assert run(prefixes, text, media=[first, third]) == 4
    assert run(prefixes, text, media=[first]) == 4


@pytest.mark.parametrize(("n", "found"), [(0, 7), (1, 7), (2, 4), (4, 4)])
def test_f5_a_text_that_goes_back_into_an_image_shares_nothing_more(n, found):
    prefixes = new_cache()
    text = [1, 9, 9, 9, 9, 9, 2]
    sequence, _ = start(prefixes, text, media=[Media(1, 6, b"image")])
    sequence.rollback(n)
    check_extend(prefixes.pool, {sequence: [*text, 3][7 - n :]})
    prefixes.publish(sequence)
    assert prefixes.lookup([*text, 0], media=[Media(1, 6, b"image")]).num_tokens == found
    assert prefixes.lookup([*text, 0]).num_tokens == 1


def test_f5_a_fork_before_an_image_shares_nothing_more():
    prefixes = new_cache()
    text = [1, 2, 3, 4, 9, 9, 9, 9, 5]
    image = Media(4, 8, b"image")
    sequence = prefixes.acquire(text, media=[image])
    check_extend(prefixes.pool, {sequence: text[:4]})
    fork = sequence.fork()
    check_extend(prefixes.pool, {fork: text[4:]})
    prefixes.publish(fork)
    assert prefixes.lookup(text, media=[image]).num_tokens == 4
    check_extend(prefixes.pool, {sequence: text[4:]})
    assert prefixes.lookup(text, media=[image]).num_tokens == 8


def test_f5_tokens_that_were_rejected_before_an_image_end_the_sharing():
    prefixes = new_cache()
    text = [1, 2, 3, 4, 9, 9, 9, 9, 5]
    image = Media(4, 8, b"image")
    sequence = prefixes.acquire(text, media=[image])
    with prefixes.pool.step([sequence], [text[:6]]) as step:
        append_layers(step)
        step.commit(keep=[4])
    check_extend(prefixes.pool, {sequence: text[4:]})
    assert prefixes.lookup(text, media=[image]).num_tokens == 0


def test_f5_an_image_that_is_still_to_come_counts_when_it_comes():
    prefixes = new_cache()
    text = [1, 9, 9, 9, 9, 9, 2, 3]
    sequence = prefixes.acquire(text, media=[Media(1, 6, b"image")])
    sequence.rollback(0)
    check_extend(prefixes.pool, {sequence: text[:2]})
    check_extend(prefixes.pool, {sequence: text[2:]})
    assert prefixes.lookup(text, media=[Media(1, 6, b"image")]).num_tokens == 7
    assert prefixes.lookup(text).num_tokens == 1


@pytest.mark.parametrize(
    ("media", "error", "message"),
    [
        ([Media(0, 11, b"x")], InvalidValueError, r"media\[0\] ends at 11; expected at most 10 tokens"),
        ([Media(0, 5, b"x"), Media(4, 6, b"y")], InvalidValueError, "media overlap"),
        ([b"x"], InvalidTypeError, r"media\[0\] is a bytes; expected a Media"),
        (b"x", InvalidTypeError, "media is a bytes; expected a list of Media"),
        (Media(0, 1, b"x"), InvalidTypeError, "media is a Media; expected a list"),
    ],
)
def test_media_that_do_not_fit_are_refused(media, error, message):
    with pytest.raises(error, match=message):
        new_cache().acquire(PROMPT, media=media)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-1, 2, b"x"), InvalidValueError, "start is -1"),
        ((2, 2, b"x"), InvalidValueError, "stop is 2; expected an integer >= 3"),
        ((0, 2, "x"), InvalidTypeError, "digest is a str; expected bytes"),
        ((0, 2, b""), InvalidValueError, "digest has 0 bytes; expected 1 to 255"),
        ((0, 2, bytes(256)), InvalidValueError, "digest has 256 bytes; expected 1 to 255"),
    ],
)
def test_a_medium_that_is_none_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Media(*arguments)


def test_invalidating_a_namespace_forgets_it_and_leaves_the_others():
    prefixes = new_cache(spec=MIXED)
    run(prefixes, PROMPT, "one")
    run(prefixes, [*PROMPT[:4], 50, 60], "one")
    run(prefixes, PROMPT, "other")
    kept = prefixes.statistics.num_kept
    assert prefixes.invalidate("one") == kept["full"] - 3 + kept["sliding"] - 3
    assert prefixes.statistics.num_kept == {"full": 3, "sliding": 3}
    prefixes.pool.check()
    assert run(prefixes, PROMPT, "other") == 9
    assert run(prefixes, PROMPT, "one") == 0


def test_a_running_sequence_of_an_invalidated_namespace_goes_on_and_shares_nothing_more():
    prefixes = new_cache()
    sequence, _ = start(prefixes, PROMPT[:6], "one")
    prefixes.invalidate("one")
    prefixes.pool.check()
    check_extend(prefixes.pool, {sequence: PROMPT[6:]})
    assert prefixes.publish(sequence) == 0
    assert prefixes.lookup(PROMPT, "one").num_tokens == 0
    run(prefixes, PROMPT, "one")
    assert prefixes.publish(sequence) == 0
    check_extend(prefixes.pool, {sequence: [50, 60, 70]})


def test_invalidating_an_unknown_namespace_changes_nothing_and_says_so():
    prefixes = new_cache()
    run(prefixes, PROMPT, "one")
    with pytest.warns(UserWarning, match="there is nothing to invalidate in the namespace 'two'"):
        assert prefixes.invalidate("two") == 0
    assert prefixes.lookup(PROMPT, "one").num_tokens == 9


def test_invalidating_reaches_what_other_weights_computed():
    model = small_model()
    prefixes = new_cache(model=model)
    run(prefixes, PROMPT)
    copied(model)
    run(prefixes, PROMPT)
    assert prefixes.invalidate() == 12
    assert prefixes.pool.num_free == prefixes.pool.num_blocks


def test_a_namespace_of_which_nothing_is_left_is_forgotten():
    prefixes = new_cache()
    for number in range(50):
        store(prefixes, PROMPT, number)
    prefixes.evict(40)
    assert len(prefixes._roots) == 0
