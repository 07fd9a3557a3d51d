"""Random numbers: Philox against the published vectors, and independence of everything but their key."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.runtime.errors import BadParameter
from serai.runtime.sampling.random import ROOT_BRANCH, child_branch, fresh_seed, philox, uniform

WORDS = st.integers(0, 2**32 - 1)
HALVES = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = (int(word, 16) for word in counter.split())
    k0, k1 = (int(word, 16) for word in key.split())
    assert philox((c0, c1, c2, c3), (k0, k1)) == tuple(int(word, 16) for word in expected.split())


@given(st.tuples(WORDS, WORDS, WORDS, WORDS), st.tuples(WORDS, WORDS))
def test_philox_agrees_with_numpys_wide_multiplication(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> None:
    c = [np.uint64(word) for word in counter]
    k = [np.uint64(word) for word in key]
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for turn in range(10):
        with np.errstate(over="ignore"):
            first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
            keys = [k[0] + np.uint64(turn * 0x9E3779B9 % 2**32), k[1] + np.uint64(turn * 0xBB67AE85 % 2**32)]
        c = [
            (second >> shift) ^ c[1] ^ (keys[0] & low),
            second & low,
            (first >> shift) ^ c[3] ^ (keys[1] & low),
            first & low,
        ]
    assert philox(counter, key) == tuple(int(word) for word in c)


@given(HALVES, HALVES, st.integers(0, 2**48 - 1), st.integers(0, 2**17 - 1))
def test_a_uniform_lies_in_the_half_open_unit_interval_and_is_repeatable(
    seed: int, branch: int, position: int, draw: int
) -> None:
    number = uniform(seed, branch, position, draw)
    assert 0.0 <= number < 1.0
    assert (number * 2.0**53).is_integer()
    assert number == uniform(seed, branch, position, draw)


def test_every_part_of_the_key_changes_the_number() -> None:
    """B96: seeds, branches (copies of one request), positions and draws all differ."""
    base = {"seed": 7, "branch": 3, "position": 40, "draw": 0}
    numbers = {uniform(**base)}
    for name, top in (("seed", 64), ("branch", 64), ("position", 48), ("draw", 17)):
        for bit in range(top):
            numbers.add(uniform(**(base | {name: base[name] ^ (1 << bit)})))
    assert len(numbers) == 1 + 64 + 64 + 48 + 17


def test_many_uniforms_are_spread_evenly_and_uncorrelated() -> None:
    numbers = np.array([uniform(1, ROOT_BRANCH, position) for position in range(20_000)])
    counts = np.histogram(numbers, bins=50, range=(0.0, 1.0))[0]
    assert ((counts - 400.0) ** 2 / 400.0).sum() < 100.0  # chi squared of 49 degrees: one in 30,000 is above
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_branches_of_a_family_are_all_different_and_never_the_roots() -> None:
    family = {ROOT_BRANCH}
    for ordinal in range(50):
        child = child_branch(ROOT_BRANCH, ordinal)
        family.add(child)
        family |= {child_branch(child, grandchild) for grandchild in range(50)}
    assert len(family) == 1 + 50 + 2500


def test_a_branch_stays_the_same_in_every_version() -> None:
    """Branches are stored with sessions, so these two numbers may never change."""
    assert child_branch(0, 0) == 16550327725981053701
    assert child_branch(child_branch(0, 1), 2) == 17041764098721552935


def test_fresh_seeds_differ_and_survive_a_reader_that_keeps_numbers_as_floats() -> None:
    """B96: no seed given must not mean a constant one."""
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(int(float(seed)) == seed for seed in seeds)


@pytest.mark.parametrize(
    "arguments", [(-1, 0, 0, 0), (2**64, 0, 0, 0), (0, -1, 0, 0), (0, 0, -1, 0), (0, 0, 2**48, 0), (0, 0, 0, 2**17)]
)
def test_a_number_that_does_not_fit_is_refused(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(BadParameter, match="must be from 0 to"):
        uniform(*arguments)
