"""A runtime over the scripted model: everything but the forward pass is the real thing."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio.to_thread

from serai.checkpoints.files.disk import Disk
from serai.checkpoints.snapshot import Fingerprint
from serai.checkpoints.store import Store
from serai.runtime.engine import Engine
from serai.runtime.engine_thread import EngineThread
from serai.runtime.figures import ModelFacts
from serai.runtime.memory.accounts import Quota
from serai.runtime.runtime import Runtime, running
from serai.runtime.scheduler import Limits
from serai.runtime.services import Policy, assemble
from serai.runtime.sessions.journal import Journal
from serai.runtime.state import StatePool
from tests.runtime.scripted import LAYOUT, VOCAB, ScriptedModel

FINGERPRINT = Fingerprint(
    config="scripted",
    tokenizer="none",
    chat_format="none",
    precision="exact",
    trunk="as stored",
    latents="float32",
    experts_per_token=0,
    state_layout=LAYOUT.describe(),
    weights="scripted",
    build="scripted",
    simd="scripted",
)

ONLY_SESSIONS = Policy(reuse=False)
"""Nothing is kept but live sessions, so that their bytes can be counted."""


@asynccontextmanager
async def fake_runtime(
    model: ScriptedModel | None = None,
    *,
    store: Path | None = None,
    limits: Limits | None = None,
    limit_bytes: int | None = None,
    max_positions: int = 10_000,
    stop_ids: frozenset[int] = frozenset(),
    fingerprint: Fingerprint = FINGERPRINT,
    policy: Policy = ONLY_SESSIONS,
    quotas: Mapping[str, Quota] | None = None,
    disk: Disk | None = None,
) -> AsyncIterator[Runtime]:
    """A runtime whose sessions are checked to leave nothing behind when the block ends."""
    kept = None if store is None else await anyio.to_thread.run_sync(lambda: Store.open(str(store), disk=disk))
    thread = EngineThread()
    model = model or ScriptedModel()
    pool = StatePool(model.layout, limit_bytes=limit_bytes, poison=True)
    services = assemble(
        engine=Engine(model, model.layout),
        thread=thread,
        pool=pool,
        limits=limits,
        policy=policy,
        journal=Journal(kept, fingerprint, model.layout),
        tokenizer=None,
        vocab_size=VOCAB,
        max_positions=max_positions,
        stop_ids=stop_ids,
    )
    facts = ModelFacts("scripted", "exact", None, 0, 0, 0, limit_bytes or 0)
    try:
        runtime = Runtime(services, facts)
        for namespace, quota in (quotas or {}).items():
            runtime.set_quota(namespace, quota)
        async with running(runtime):
            yield runtime
        assert pool.live_bytes == 0, "every buffer came back"
        assert pool.beside_bytes == 0, "and no ids are counted for a session that has ended"
    finally:
        thread.close()
        if kept is not None:
            kept.close()
