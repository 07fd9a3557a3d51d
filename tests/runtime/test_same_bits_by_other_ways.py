"""With the trained model: guessing ahead, and reading again what was lost, leave the same bits as plain decoding."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from serai.runtime import Runtime, SamplingParams, open_runtime
from serai.runtime.models.open_model import Precision
from serai.runtime.services import Policy

pytestmark = pytest.mark.anyio

REPEATED = ("red box, blue lamp, grey cat, " * 4, "The code of the red box is 4172. " * 6, "one two three four " * 8)
TEMPERATURES = (0.0, 0.7, 1.0, 1.6)
SAMPLED = SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.1, max_tokens=80)


async def written(rt: Runtime, text: str, temperature: float) -> tuple[tuple[int, ...], bytes]:
    """The tokens of a generation after the text, and the bits of the next-token logits at its end."""
    session = await rt.session()
    await session.append(text)
    done = await session.generate(SamplingParams(temperature=temperature, seed=3, max_tokens=80)).collect()
    return done.tokens, (await session.logits()).tobytes()


@pytest.mark.parametrize("precision", Precision)
async def test_guessing_changes_no_bit_of_the_state_it_leaves(precision: Precision) -> None:
    """Right guesses are kept and wrong ones undone in every layer, to the last bit."""
    found = {}
    for guess in (False, True):
        policy = Policy(reuse=False, guess=guess)
        async with open_runtime("nano", budget="1GiB", precision=precision, policy=policy) as rt:
            found[guess] = [await written(rt, text, hot) for text in REPEATED for hot in TEMPERATURES]
            counters = rt.counters
    assert counters.guessed_tokens > counters.right_guesses > 0, "some guesses must be right and some wrong"
    assert found[True] == found[False]


@pytest.mark.parametrize("precision", Precision)
async def test_a_state_that_is_read_again_from_its_tokens_has_the_same_bits(
    precision: Precision, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    policy = Policy(reuse=False)
    async with open_runtime("nano", budget="1GiB", store=store, precision=precision, policy=policy) as rt:
        session = await rt.session()
        await session.append(REPEATED[0])
        await session.generate(SAMPLED).collect()
        logits: NDArray[np.float32] = await session.logits()
        point = await session.pause()
    shutil.rmtree(store / "parts")
    async with open_runtime("nano", budget="1GiB", store=store, precision=precision, policy=policy) as rt:
        again = await rt.resume(point)
        assert (await again.logits()).tobytes() == logits.tobytes()
        assert rt.counters.prefilled_tokens == again.position > 30
