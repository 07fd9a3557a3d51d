"""`serai bench monitor`: how much of a core the session monitor takes while it shows 256 sessions.

The process is `serai monitor` as a person would start it, on a pseudo-terminal of its own, asking a server in this
process once a second. The server gives out statuses of the monitor's simulation, made beforehand, in which sessions
come and go from work; so every look brings changes. Counted is the processor time of the monitor's process, that in
the kernel too, between two moments after it has started.
"""

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import anyio

from serai.runtime.bench.report import BenchFailed, Claim, Report
from serai.runtime.monitor.demo import Demo

SESSIONS = 256
SHARE_LIMIT = 0.05
SIZES = ((80, 24), (160, 50))
SECONDS = 20.0
QUICK_SECONDS = 5.0
GIVE_UP_AFTER_S = 60.0


def bench_monitor(*, quick: bool, tell: Callable[[str], None]) -> Report:
    """Measure at a small and a large terminal; the claim is the larger share."""
    seconds = QUICK_SECONDS if quick else SECONDS
    rows = []
    with _server(anyio.run(_bodies, round(seconds) + 5)) as address:
        for width, height in SIZES:
            tell(f"{SESSIONS} sessions on {width}×{height} for {seconds:g} s")
            share, drawn_bytes_s = core_share(address, width, height, seconds)
            rows.append({"width": width, "height": height, "core_share": share, "drawn_bytes_s": drawn_bytes_s})
    worst = max(float(row["core_share"]) for row in rows)
    how = (
        f"processor time of serai monitor over {seconds:g} s, {SESSIONS} sessions, a status a second over HTTP, "
        f"the larger of {' and '.join(f'{width}×{height}' for width, height in SIZES)}"
    )
    return Report("monitor", (Claim.below("monitor_core_share", worst, "of a core", SHARE_LIMIT, how),), tuple(rows))


def core_share(address: str, width: int, height: int, seconds: float) -> tuple[float, float]:
    """The share of a core that the monitor takes, and how many bytes a second it draws."""
    master, slave = pty.openpty()
    try:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        process = subprocess.Popen(
            [sys.executable, "-m", "serai.runtime", "monitor", address],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd="/",
            env=os.environ | {"TERM": "xterm-256color"},
            start_new_session=True,
        )
        os.close(slave)
        try:
            if b"sessions" not in _drain(master, GIVE_UP_AFTER_S, until=f"{SESSIONS:,} sessions".encode()):
                raise BenchFailed("the monitor did not show the sessions it was given")
            _drain(master, 2.0)
            began_s, before_s = time.monotonic(), _processor_s(process.pid)
            drawn = len(_drain(master, seconds))
            spent_s, passed_s = _processor_s(process.pid) - before_s, time.monotonic() - began_s
        finally:
            process.kill()
            process.wait()
    finally:
        os.close(master)
    return spent_s / passed_s, drawn / passed_s


def _drain(master: int, seconds: float, *, until: bytes | None = None) -> bytes:
    """What the monitor draws in that time, or up to some text."""
    drawn, end = bytearray(), time.monotonic() + seconds
    while time.monotonic() < end and (until is None or until not in drawn):
        if select.select([master], [], [], 0.1)[0]:
            try:
                drawn += os.read(master, 65_536)
            except OSError as error:
                raise BenchFailed("the monitor left before it could be measured") from error
    return bytes(drawn)


def _processor_s(pid: int) -> float:
    """User and system time of a process so far (proc(5): fields 14 and 15, counted after the name in brackets)."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _bodies(number: int) -> list[bytes]:
    demo = Demo(sessions=SESSIONS)
    return [json.dumps((await demo.status()).to_json()).encode() for _ in range(number)]


@contextmanager
def _server(bodies: Sequence[bytes]) -> Iterator[str]:
    """A server that gives out the statuses in turn, and knows nothing else."""
    asked = count()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            known = self.path == "/serai/status"
            body = bodies[next(asked) % len(bodies)] if known else b""
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
            """Stdout and stderr belong to the bench's report."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
