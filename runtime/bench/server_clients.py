"""The clients of `serai bench server`, in a process of their own: `python -m serai.runtime.bench.server_clients`.

Steady ones stream completions, a token an event, and are counted from when all have their first; restless ones leave,
cancel, read slowly or not at all, drawn from a seed. All stop the given time after that. What they saw is printed as
one JSON object.
"""

import asyncio
import json
import random
import sys
import time
from typing import Any

TOKENS = 60_000
"""More than any stream can give in the time of the bench."""

PATIENCE_S = 120.0
"""For the first token of every steady client: on a busy machine reading all their prompts takes a while."""


class Swarm:
    def __init__(self, port: int, seconds: float) -> None:
        self._port = port
        self._seconds = seconds
        self._until_s = 0.0
        self._to_begin: set[int] = set()
        self._all_have_begun = asyncio.Event()
        self.tokens: dict[int, int] = {}
        self.health_s: list[float] = []
        self.left = 0
        self.failed: list[str] = []

    async def run(self, steady: int, restless: int) -> None:
        self._to_begin = set(range(steady))
        if not steady:
            self._all_have_begun.set()
        streams = [asyncio.create_task(self._steady(number)) for number in range(steady)]
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._all_have_begun.wait()
            self.tokens = dict.fromkeys(range(steady), 0)
            self._until_s = time.monotonic() + self._seconds
            async with asyncio.TaskGroup() as tasks:
                for number in range(restless):
                    tasks.create_task(self._restless(random.Random(number)))
                tasks.create_task(self._health())
        except TimeoutError:
            self.failed.append(f"{len(self._to_begin)} of {steady} clients had no token after {PATIENCE_S:g} s")
        for one in streams:
            one.cancel()
        for ended in await asyncio.gather(*streams, return_exceptions=True):
            if isinstance(ended, Exception):
                self.failed.append(f"a steady client failed: {ended!r}")

    async def _steady(self, number: int) -> None:
        body = {"model": "m", "prompt": f"client {number}", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        reader, writer = await self._send("POST", "/v1/completions", body)
        try:
            async for line in reader:
                if line.startswith(b"data: {"):
                    self._count(number)
            self.failed.append(f"the stream of client {number} ended")
        finally:
            writer.close()

    def _count(self, number: int) -> None:
        if self._to_begin:
            self._to_begin.discard(number)
            if not self._to_begin:
                self._all_have_begun.set()
        elif time.monotonic() <= self._until_s:  # the last to look, whoever asks for health, is a little later
            self.tokens[number] += 1

    async def _restless(self, chance: random.Random) -> None:
        while self._rest_s > 0:
            patience_s = min(chance.expovariate(2.0), self._rest_s)
            kind = chance.choice(["leave", "leave early", "read slowly", "stop reading", "cancel"])
            body: dict[str, Any] = {"model": "m", "input": "x" * chance.randrange(1, 300), "store": False}
            body |= {"max_output_tokens": 2_000, "stream": True, "background": kind == "cancel"}
            reader, writer = await self._send("POST", "/v1/responses", body)
            try:
                if kind == "stop reading":
                    await asyncio.sleep(patience_s)
                elif kind == "read slowly":
                    await self._dawdle(reader, patience_s)
                elif kind != "leave early":
                    id_ = await self._read_for(reader, patience_s)
                    if kind == "cancel" and id_ is not None:
                        await self._whole("POST", f"/v1/responses/{id_}/cancel")
            finally:
                writer.close()
                self.left += 1

    async def _read_for(self, reader: asyncio.StreamReader, seconds: float) -> str | None:
        """Read a stream until the id of its response is there and then for a while; the id, None after an error."""
        id_ = None
        async for line in reader:
            if line.startswith(b"data: {"):
                id_ = json.loads(line[6:]).get("response", {}).get("id")
                break
        try:
            async with asyncio.timeout(seconds):
                async for _ in reader:
                    pass
        except TimeoutError:
            pass
        return id_

    async def _dawdle(self, reader: asyncio.StreamReader, seconds: float) -> None:
        """Take 100 bytes a tenth of a second: an event has several times that, and ten come in that time."""
        for _ in range(int(10 * seconds)):
            if not await reader.read(100):
                return
            await asyncio.sleep(0.1)

    async def _health(self) -> None:
        while self._rest_s > 0:
            began_s = time.monotonic()
            status = await self._whole("GET", "/health")
            self.health_s.append(time.monotonic() - began_s)
            if status != 200:
                self.failed.append(f"/health answered {status}")
            await asyncio.sleep(0.05)

    @property
    def _rest_s(self) -> float:
        return max(self._until_s - time.monotonic(), 0.0)

    async def _send(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        return reader, writer

    async def _whole(self, method: str, path: str) -> int:
        reader, writer = await self._send(method, path)
        try:
            answer = await reader.read()
            return int(answer.split(b" ", 2)[1])
        finally:
            writer.close()


def main(port: str, seconds: str, steady: str, restless: str) -> None:
    swarm = Swarm(int(port), float(seconds))
    asyncio.run(swarm.run(int(steady), int(restless)))
    seen = {
        "tokens": list(swarm.tokens.values()),
        "health_s": swarm.health_s,
        "left": swarm.left,
        "failed": swarm.failed,
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:5])
