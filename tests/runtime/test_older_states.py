"""A store of an earlier build, whose KDA states are matrices by rows and not panels: never read as what they aren't."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serai.checkpoints.store import Store
from serai.kernels.kda_panels import to_matrices
from serai.runtime import SamplingParams, Session, open_runtime
from serai.runtime.bench.killed import PROMPT
from serai.runtime.bench.tiny import write_tiny_model
from serai.runtime.models.config import KdaConfig
from serai.runtime.models.locate import BUILT_IN
from serai.runtime.models.open_model import find_model
from serai.runtime.runtime import Runtime
from tests.runtime.odd_models import odd_shapes

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(params=["heads of two panels", "heads of one panel and a half"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "heads of two panels":
        return BUILT_IN["nano"]
    write_tiny_model(tmp_path / "model", odd_shapes()["three heads, widths off every multiple of 16"])
    return tmp_path / "model"


def kda_of(model: Path) -> KdaConfig:
    found = find_model(model)
    found.files.close()
    return found.config.kda


async def resumed(rt: Runtime, point: str) -> Session:
    return await rt.resume(point)


async def resumed_as_is(rt: Runtime, point: str) -> Session:
    return await rt.resume(point, as_is=True)


async def begun_alike(rt: Runtime, point: str) -> Session:
    """Another session with the same tokens, which starts from a stored prefix where it can."""
    session = await rt.session()
    await session.append(PROMPT)
    return session


@pytest.mark.parametrize("way", [resumed, resumed_as_is, begun_alike])
async def test_its_states_are_computed_again_and_not_read(
    model: Path, tmp_path: Path, way: Callable[[Runtime, str], Awaitable[Session]]
) -> None:
    async with open_runtime(model, budget="1GiB", store=tmp_path / "store") as rt:
        session = await rt.session()
        await session.append(PROMPT)
        logits = await session.logits()
        point = (await session.pause()).id
    async with open_runtime(model, budget="1GiB", store=tmp_path / "store") as rt:
        session = await way(rt, point)
        assert rt.counters.prefilled_tokens == 0, "in this build's order it is read"
        tokens = (await session.generate(GREEDY).collect()).tokens

    kda = kda_of(model)
    with Store.open(str(tmp_path / "store")) as store:
        for info in list(store.snapshots()):
            snapshot = store.load(info.node_id)
            # With other numbers, so that whoever reads them answers otherwise, in whatever order.
            matrices = to_matrices(snapshot.kda, kda.heads, kda.head_dim) + np.float32(1)
            layers, heads, key_dim, value_dim = matrices.shape
            layout = replace(snapshot.layout, kda_shape=(layers, heads, key_dim, value_dim))
            made_by = replace(info.fingerprint, state_layout=layout.describe())
            store.save(info.node_id, replace(snapshot, layout=layout, kda=matrices), made_by, reason="test")

    async with open_runtime(model, budget="1GiB", store=tmp_path / "store") as rt:
        session = await way(rt, point)
        assert (rt.counters.prefilled_tokens, session.inexact) == (len(PROMPT), False)
        np.testing.assert_array_equal(await session.logits(), logits)
        assert (await session.generate(GREEDY).collect()).tokens == tokens
        await session.pause()
    async with open_runtime(model, budget="1GiB", store=tmp_path / "store") as rt:
        await rt.resume(session.id)
        assert rt.counters.prefilled_tokens == 0, "it is stored in this build's order now"
