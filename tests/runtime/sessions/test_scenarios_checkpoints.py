"""Scenarios from the field: points that are not there, full disks, slow disks, and many who pause at once."""

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from serai.checkpoints.files.codec import Packing
from serai.checkpoints.store import Store
from serai.checkpoints.upkeep.fsck import fsck
from serai.runtime import Runtime, SamplingParams, Session
from serai.runtime.errors import (
    BadParameter,
    PositionUnavailable,
    SessionGone,
    StoreFull,
)
from serai.runtime.services import Policy
from serai.runtime.state import session_bytes, snapshot_of
from tests.checkpoints.disks import ScalarDisk, WaitingDisk
from tests.checkpoints.test_hostile import bomb, rewrite_payload
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import GREEDY, LAYOUT, SAMPLED, greedy_by_hand, hash_of, logits_of
from tests.runtime.sessions.world import MEMORY

pytestmark = pytest.mark.anyio

KEEPING = Policy(reuse=True, snapshot_every=16, save_after_tokens=4)
UNKNOWN = ("a" * 26, "nope", "", "../../etc/passwd")


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """For stores that are written hundreds of times: what a disk does is tested elsewhere."""
    with tempfile.TemporaryDirectory(prefix="serai-", dir=MEMORY) as folder:
        yield Path(folder)


def everything_under(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


async def equals_cold(session: Session, ids: list[int]) -> bool:
    same_ids = session.tokens().tolist() == ids
    return same_ids and bool(np.array_equal(await session.logits(), logits_of(hash_of(ids))))


def check_files(store: Store) -> None:
    """Every file is whole and belongs to something."""
    found = fsck(store, remove_orphans=False)
    assert (found.problems, found.orphans) == ((), ())


async def expect_unknown(rt: Runtime, session: Session, how: str, node: str) -> None:
    if how == "resume":
        with pytest.raises((SessionGone, BadParameter)):
            await rt.resume(node)
    elif how == "fork":
        with pytest.raises(PositionUnavailable, match="is not on the way of session"):
            await session.fork(node=node)
    else:
        with pytest.raises(PositionUnavailable, match="is not on the way of session"):
            await session.rewind(node=node)


@pytest.mark.parametrize("node", UNKNOWN)
@pytest.mark.parametrize("how", ["resume", "fork", "rewind"])
async def test_a_point_that_is_not_there_leaves_the_live_session_as_it_was(tmp_path: Path, how: str, node: str) -> None:
    """B54: whoever names a point that there is none of is told so, and the session goes on as one that nobody asked."""
    async with fake_runtime(store=tmp_path, policy=KEEPING) as rt:
        session = await rt.session()
        await session.append([5, 6, 7])
        given = list((await session.generate(SAMPLED).collect()).tokens)
        twin = await session.twin()
        await rt.settle()
        before, files, head = session.status(0.0), everything_under(tmp_path), session.head
        await expect_unknown(rt, session, how, node)
        assert (session.status(0.0), everything_under(tmp_path), session.head) == (before, files, head)
        assert session.tokens().tolist() == [5, 6, 7, *given]
        rt.check()
        assert (await session.generate(SAMPLED).collect()).tokens == (await twin.generate(SAMPLED).collect()).tokens


@pytest.mark.parametrize("how", ["resume", "fork"])
async def test_nor_does_it_disturb_a_reply_that_is_being_read(tmp_path: Path, how: str) -> None:
    """B54"""
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([5, 6, 7])
        stream = session.generate(GREEDY)
        given = [(await anext(stream)).id for _ in range(3)]
        await expect_unknown(rt, session, how, "a" * 26)
        given += [token.id async for token in stream]
        assert given == greedy_by_hand([5, 6, 7], 8)
        assert await equals_cold(session, [5, 6, 7, *given])


@pytest.mark.parametrize("content", [b"", bytes(200)], ids=["empty", "zeros"])
async def test_a_checkpoint_of_nothing_costs_its_tokens_again_and_no_session(tmp_path: Path, content: bytes) -> None:
    """B54: a file of 0 bytes, or of zeros, where a checkpoint was: it is set aside, and its ids give the same state."""
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([5, 6, 7])
        point = await session.pause()
        session = await rt.resume(point)
        for file in everything_under(tmp_path / "parts"):
            if file.is_file():
                file.write_bytes(content)
        prefilled = rt.counters.prefilled_tokens
        branch = await rt.resume(point)
        assert rt.counters.prefilled_tokens == prefilled + 3
        assert await equals_cold(branch, [5, 6, 7])
        await session.append([8])
        assert await equals_cold(session, [5, 6, 7, 8])
        rt.check()


@pytest.mark.parametrize("claim_bytes", [None, 1 << 60])
async def test_a_bomb_in_a_checkpoint_takes_no_more_than_the_budget(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, claim_bytes: int | None
) -> None:
    """B69: the resume that meets it has reserved what its own layout says, and never holds more; then the ids give the
    state."""
    ids = [number % 16 for number in range(40)]
    async with fake_runtime(store=memory_path) as rt:
        session = await rt.session()
        await session.append(ids)
        point = await session.pause()
    parts = [file for file in everything_under(memory_path / "parts") if file.is_file()]
    rewrite_payload(max(parts, key=lambda file: file.stat().st_size), bomb(64 << 20, claim_bytes=claim_bytes))
    limit_bytes = 2 * session_bytes(LAYOUT, 40)
    async with fake_runtime(store=memory_path, limit_bytes=limit_bytes) as rt:
        seen: list[int] = []
        load = Store.load

        def noting(*arguments: Any, **named: Any) -> Any:
            pool = rt.pool
            held = pool.live_bytes + pool.beside_bytes + pool.spare_bytes
            seen.append(held + rt._services.admission.reserved_bytes)
            return load(*arguments, **named)

        monkeypatch.setattr(Store, "load", noting)
        session = await rt.resume(point)
        assert await equals_cold(session, ids)
        assert seen
        assert max(seen) <= limit_bytes
        assert rt.counters.prefilled_tokens == 40
        rt.check()


class SmallDisk(ScalarDisk):
    """A disk with `room_bytes` left. Files that are removed give theirs back."""

    def __init__(self) -> None:
        self.room_bytes = 1 << 20

    def write(self, fd: int, data: memoryview) -> int:
        if self.room_bytes <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = super().write(fd, data[: self.room_bytes])
        self.room_bytes -= done
        return done

    def unlink(self, name: str, *, folder: int) -> None:
        size = os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
        super().unlink(name, folder=folder)
        self.room_bytes += size


@pytest.mark.parametrize("room_bytes", [0, 3_000], ids=["no-room", "room-for-a-part"])
async def test_a_pause_on_a_full_disk_fails_and_the_session_lives(tmp_path: Path, room_bytes: int) -> None:
    """B61: nothing partial is there or listed, the former checkpoint is whole, and with room again the pause works."""
    disk, first = SmallDisk(), [1, 2, 3, 4, 5]
    async with fake_runtime(store=tmp_path, disk=disk) as rt:
        assert rt.store is not None
        session = await rt.session()
        await session.append(first)
        former = await session.pause()
        session = await rt.resume(former)
        later = [number % 16 for number in range(200)]
        await session.append(later)
        ids = [*first, *later]
        before, files = rt.store.snapshots(), everything_under(tmp_path)
        disk.room_bytes = room_bytes
        for _ in range(3):
            with pytest.raises(StoreFull, match=r"no space is left .*intact"):
                await session.pause()
            assert disk.room_bytes == room_bytes, "whatever was begun was removed"
        assert (session.is_open, session.doing) == (True, None)
        assert await equals_cold(session, ids)
        assert rt.store.snapshots() == before
        assert everything_under(tmp_path) == files
        check_files(rt.store)
        branch = await rt.resume(former)
        assert await equals_cold(branch, first), "the former one is whole"
        disk.room_bytes = 3_000
        fork = await session.fork()
        reply = list((await fork.generate(GREEDY).collect()).tokens)
        assert reply == greedy_by_hand(ids, 8), "ids have room, and those are all it takes to go on"
        with pytest.raises(StoreFull):
            await session.pause()
        disk.room_bytes = 1 << 20
        point = await session.pause()
    async with fake_runtime(store=tmp_path) as rt:
        again = await rt.resume(point)
        assert rt.counters.prefilled_tokens == 0
        assert await equals_cold(again, ids)


async def test_while_a_slow_save_runs_the_state_in_memory_is_what_others_get(tmp_path: Path) -> None:
    """B66: forked and resumed while its checkpoint is being written; nobody sees half of it."""
    disk, ids = WaitingDisk(), [1, 2, 3, 4, 5, 6]
    async with fake_runtime(store=tmp_path, disk=disk) as rt:
        assert rt.store is not None
        session = await rt.session()
        await session.append(ids)
        points: list[Any] = []

        async def pause() -> None:
            points.append(await session.pause())

        async with anyio.create_task_group() as tasks:
            disk.armed = True
            tasks.start_soon(pause)
            assert await anyio.to_thread.run_sync(disk.reached.wait, 30)
            disk.armed = False  # it alone is slow; what others write is not
            try:
                read = rt.counters.prefilled_tokens
                fork = await session.fork()
                assert await equals_cold(fork, ids)
                assert rt.counters.prefilled_tokens == read, "it has the state in memory"
                assert rt.store.snapshots() == []
                resumed = await rt.resume(session.id)
                assert resumed.id != session.id
                assert await equals_cold(resumed, ids)
                await fork.append([7])
                await resumed.append([8])
                assert points == [], "it is still being written"
            finally:
                disk.go.set()
        assert await equals_cold(fork, [*ids, 7])
        assert await equals_cold(resumed, [*ids, 8])
        read = rt.counters.prefilled_tokens
        again = await rt.resume(points[0])
        assert again.id == session.id
        assert await equals_cold(again, ids)
        assert rt.counters.prefilled_tokens == read
        check_files(rt.store)
        rt.check()


def bits_of(session: Session) -> list[bytes]:
    """The session's state in memory, to the byte."""
    assert session.held is not None
    found = snapshot_of(LAYOUT, session.held)
    logits = b"" if found.logits is None else found.logits.tobytes()
    return [found.kda.tobytes(), found.conv.tobytes(), logits, *(page.rows.tobytes() for page in found.pages)]


@pytest.mark.parametrize("packing", [Packing.AUTO, Packing.SMALL])
async def test_eight_sessions_pause_and_resume_two_hundred_times(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, packing: Packing
) -> None:
    """B70: all at once, and each comes back to the byte, from its file and not from its ids."""
    save = Store.save

    def packed(store: Store, *arguments: Any, **named: Any) -> Any:
        return save(store, *arguments, **{**named, "packing": packing})

    monkeypatch.setattr(Store, "save", packed)
    sampled = SamplingParams.from_record({**SAMPLED.to_record(), "max_tokens": 1})
    async with fake_runtime(store=memory_path) as rt:
        assert rt.store is not None
        read: list[int] = []

        async def live(seed: int) -> None:
            session = await rt.session()
            for number in range(25):
                given = [(seed + number) % 16] * (1 + (seed + number) % 3)
                await session.append(given)
                read.append(len(given))
                await session.generate(sampled).collect()
                before, tokens = bits_of(session), session.tokens().tolist()
                session = await rt.resume(await session.pause())
                assert bits_of(session) == before
                assert await equals_cold(session, tokens)

        async with anyio.create_task_group() as tasks:
            for seed in range(8):
                tasks.start_soon(live, seed)
        assert len(read) == 200
        assert rt.counters.prefilled_tokens == sum(read), "nothing was read again"
        assert len(rt.store.snapshots()) == 200
        check_files(rt.store)
        rt.check()
