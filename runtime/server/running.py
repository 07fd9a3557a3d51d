"""Running the application under uvicorn, with an orderly end."""

import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import uvicorn
from starlette.applications import Starlette

from serai.runtime.errors import BadParameter
from serai.runtime.runtime import Runtime
from serai.runtime.server.app import serving
from serai.runtime.server.connections import bounded_by
from serai.runtime.server.options import ServerOptions


class _Server(uvicorn.Server):
    """Uvicorn without signal handlers of its own: replies are ended in order first."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(options: ServerOptions) -> socket.socket:
    """A socket that listens, so that a port in use is known before a model is loaded; who comes early waits."""
    if options.socket_path is not None:
        return _listen_unix(options.socket_path)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((options.host, options.port))
        bound.listen()  # until then another server may bind it too, and one of the two would find out after loading
    except OSError as error:
        bound.close()
        raise BadParameter(f"can't listen on {options.host}:{options.port}: {error.strerror}; name another") from None
    bound.set_inheritable(True)
    return bound


def _listen_unix(path: str) -> socket.socket:
    """A socket file that only this user can open. One that a server left behind is replaced, one in use is not."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).exists():
            if not Path(path).is_socket():
                raise BadParameter(f"can't listen on {path}: a file of that name is there, and it is no socket")
            if _answers(path):
                raise BadParameter(f"can't listen on {path}: another server does; name another")
            Path(path).unlink()
        before = os.umask(0o177)
        try:
            bound.bind(path)
        finally:
            os.umask(before)
        bound.listen()  # from now on it answers, so that another server leaves it alone while a model is loaded
    except OSError as error:
        bound.close()
        raise BadParameter(f"can't listen on {path}: {error.strerror or error}; name another") from None
    except BadParameter:
        bound.close()
        raise
    bound.set_inheritable(True)
    return bound


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        return asking.connect_ex(path) == 0


def address_of(options: ServerOptions, bound: socket.socket) -> str:
    """What a person is told of where the server is; `serai monitor` takes it too."""
    if options.socket_path is not None:
        return options.host
    return f"http://{options.host}:{bound.getsockname()[1]}/v1"


async def run_server(
    runtime: Runtime, options: ServerOptions, bound: socket.socket, *, ready: Callable[[Starlette], None]
) -> bool:
    """Serve until a signal; whether the engine was alive to the end. `ready` is called once clients can connect."""
    settle_in()
    async with serving(runtime, options) as app:
        server = _server(app, options)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_stop_on_signals, server, app)
            tasks.start_soon(_announce, server, app, ready)
            tasks.start_soon(_stop_when_dead, server, app)
            await server.serve(sockets=[bound])
            tasks.cancel_scope.cancel()
        return app.state.service.sessions.engine_error is None


def settle_in() -> None:
    """Have the garbage collector never look at what is there by now, before clients come.

    Compiled kernels alone are 200,000 objects that live as long as the process; to look through them takes a tenth of a
    second, in which no stream goes on.
    """
    gc.collect()
    gc.freeze()


async def run_app(app: Starlette, options: ServerOptions, bound: socket.socket) -> None:
    """Serve an application until cancelled; signals are the caller's."""
    server = _server(app, options)

    async def serve() -> None:
        with anyio.CancelScope(shield=True):  # cancelled half way, uvicorn would leave its sockets open
            await server.serve(sockets=[bound])
        tasks.cancel_scope.cancel()  # it may end by itself

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        try:
            await anyio.sleep_forever()
        finally:
            server.should_exit = server.force_exit = True


def _server(app: Starlette, options: ServerOptions) -> uvicorn.Server:
    return _Server(
        uvicorn.Config(
            app,
            log_level=options.log_level,
            log_config=None,  # as the program has set logging up
            access_log=False,
            lifespan="off",
            http=bounded_by(options.arrive_s),
            timeout_graceful_shutdown=int(options.shutdown_s) + 2,
            h11_max_incomplete_event_size=64 << 10,
        )
    )


async def _stop_on_signals(server: uvicorn.Server, app: Starlette) -> None:
    """The first signal lets replies under way go on for a while, the second doesn't."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with anyio.create_task_group() as tasks:
            async for _ in signals:
                if app.state.service.closing:
                    server.should_exit = server.force_exit = True
                    tasks.cancel_scope.cancel()
                    return
                tasks.start_soon(_end, server, app)


async def _end(server: uvicorn.Server, app: Starlette) -> None:
    await app.state.service.close()
    server.should_exit = True


async def _announce(server: uvicorn.Server, app: Starlette, ready: Callable[[Starlette], None]) -> None:
    while not server.started:  # noqa: ASYNC110  # uvicorn has no event for it
        await anyio.sleep(0.01)
    ready(app)


async def _stop_when_dead(server: uvicorn.Server, app: Starlette) -> None:
    """A server whose engine has failed can only say so; it ends soon after, so that a supervisor starts a new one."""
    service = app.state.service
    while service.sessions.engine_error is None:  # noqa: ASYNC110  # an engine that dies tells nobody
        await anyio.sleep(1.0)
    await anyio.sleep(service.options.shutdown_s)
    server.should_exit = True
