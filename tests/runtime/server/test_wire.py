"""Events on their way: written together when a step has begun, in order, never many at a time."""

from typing import Any

import anyio
import pytest

from serai.runtime.server.wire import MOST_HELD, Moments, Wire, line_of

pytestmark = pytest.mark.anyio


class Socket:
    """Takes what is sent; while it is not `open` nothing goes through."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers = 0
        self.open = anyio.Event()
        self.open.set()

    async def send(self, message: Any) -> None:
        await self.open.wait()
        if message["type"] == "http.response.start":
            self.headers += 1
        else:
            self.bodies.append(message["body"])


async def test_events_wait_for_a_step_to_begin_and_go_together() -> None:
    stepping = False
    socket, moments = Socket(), Moments(lambda: stepping)
    wire = Wire(socket.send, moments)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(moments.run)
        tasks.start_soon(wire.run)
        for number in range(3):
            await wire.emit("one" if number else None, {"n": number})
        assert (socket.headers, socket.bodies, wire.begun) == (0, [], True)
        stepping = True
        with anyio.fail_after(5):
            while not socket.bodies:
                await anyio.lowlevel.checkpoint()
        lines = [line_of("one" if number else None, {"n": number}) for number in range(3)]
        assert (socket.headers, socket.bodies) == (1, [b"".join(lines)])
        await wire.put(b"x")
        await wire.end(b"y")
        assert socket.bodies[1:] == [b"xy"]
        tasks.cancel_scope.cancel()


async def test_without_a_step_events_are_written_soon_all_the_same() -> None:
    socket, moments = Socket(), Moments(lambda: False)
    wire = Wire(socket.send, moments)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(moments.run)
        tasks.start_soon(wire.run)
        for number in range(2):  # and the next ones too
            await wire.put(b"%d" % number)
            with anyio.fail_after(5):
                while len(socket.bodies) <= number:
                    await anyio.lowlevel.checkpoint()
        assert socket.bodies == [b"0", b"1"]
        tasks.cancel_scope.cancel()


async def test_who_brings_events_waits_for_a_slow_client() -> None:
    socket, moments = Socket(), Moments(lambda: True)
    socket.open = anyio.Event()
    wire = Wire(socket.send, moments)
    brought = 0

    async def bring() -> None:
        nonlocal brought
        for number in range(10 * MOST_HELD):
            await wire.put(b"%d," % number)
            brought += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(moments.run)
        tasks.start_soon(wire.run)
        tasks.start_soon(bring)
        await anyio.sleep(0.05)
        assert brought <= 2 * MOST_HELD
        assert wire.puts_since_s is not None
        socket.open.set()
        with anyio.fail_after(5):
            while brought < 10 * MOST_HELD:
                await anyio.lowlevel.checkpoint()
        await wire.end(b"end")
        tasks.cancel_scope.cancel()
    assert b"".join(socket.bodies) == b"".join(b"%d," % number for number in range(10 * MOST_HELD)) + b"end"
