"""Random numbers that depend on where a token stands, never on what was drawn before.

A draw is a pure function of `(seed, branch, position, draw)`, so pausing, forking, replaying and batching cannot
change it and there is no generator state to save. The generator is Philox-4x32-10 from Salmon, Moraes, Dror and Shaw,
"Parallel random numbers: as easy as 1, 2, 3" (SC11): the seed is its 64-bit key, and its 128-bit counter is

    word 0, word 1    branch, low half first
    word 2            position, low 32 bits
    word 3            position, next 16 bits, then 16 bits of block number
"""

import hashlib
import secrets

from serai.runtime.errors import BadParameter

ROOT_BRANCH = 0
"""The branch of a session that was not forked from another."""

SEED_BITS = 64
POSITION_BITS = 48
DRAW_BITS = 17  # two draws come out of each of the 2**16 blocks of a position

_WORD = 0xFFFF_FFFF
_MULTIPLIERS = (0xD251_1F53, 0xCD9E_8D57)
_KEY_STEPS = (0x9E37_79B9, 0xBB67_AE85)
_ROUNDS = 10


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """One Philox-4x32-10 block: four random 32-bit words for a counter of four and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        even = c0 * _MULTIPLIERS[0]
        odd = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (odd >> 32) ^ c1 ^ k0, odd & _WORD, (even >> 32) ^ c3 ^ k1, even & _WORD
        k0 = (k0 + _KEY_STEPS[0]) & _WORD
        k1 = (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, branch: int, position: int, draw: int = 0) -> float:
    """A float64 in [0, 1), a multiple of 2**-53.

    `seed` and `branch` have 64 bits, `position` is the token position the draw decides and has 48, and `draw` numbers
    the draws at one position. Raises `BadParameter` for a number that doesn't fit.
    """
    _must_fit("seed", seed, SEED_BITS)
    _must_fit("branch", branch, SEED_BITS)
    _must_fit("position", position, POSITION_BITS)
    _must_fit("draw", draw, DRAW_BITS)
    block, half = divmod(draw, 2)
    counter = (branch & _WORD, branch >> 32, position & _WORD, (position >> 32) | (block << 16))
    words = philox(counter, (seed & _WORD, seed >> 32))
    return (((words[2 * half] << 32) | words[2 * half + 1]) >> 11) * 2.0**-53


def child_branch(parent_branch: int, ordinal: int) -> int:
    """The 64-bit branch of a session's fork number `ordinal` (counted from 0).

    A hash, not a counter: a fork of a fork must not meet the numbers of another line of the family.
    """
    _must_fit("parent_branch", parent_branch, SEED_BITS)
    _must_fit("ordinal", ordinal, SEED_BITS)
    name = parent_branch.to_bytes(8, "little") + ordinal.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8, person=b"serai.branch").digest(), "little")


def fresh_seed() -> int:
    """A seed from the operating system, for a generation that was given none.

    It has 53 bits, because seeds are reported in JSON and many readers of JSON hold numbers as float64.
    """
    return secrets.randbits(53)


def _must_fit(name: str, value: int, bits: int) -> None:
    if not 0 <= value < 1 << bits:
        raise BadParameter(f"{name} must be from 0 to 2**{bits} - 1, and is {value}")
