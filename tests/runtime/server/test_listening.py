"""Where a server listens: a port, or a socket file that only this user can open."""

import socket
import stat
from pathlib import Path

import pytest

from serai.runtime.errors import BadParameter
from serai.runtime.server.options import ServerOptions
from serai.runtime.server.running import address_of, listen


def test_a_socket_file_is_this_users_alone_and_needs_no_key(tmp_path: Path) -> None:
    path = tmp_path / "s"
    options = ServerOptions(host=f"unix:{path}")
    with listen(options) as bound:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert bound.family == socket.AF_UNIX
        assert address_of(options, bound) == f"unix:{path}"


def test_a_socket_that_was_left_behind_is_replaced_and_one_in_use_is_not(tmp_path: Path) -> None:
    options = ServerOptions(host=f"unix:{tmp_path / 's'}")
    listen(options).close()
    with listen(options), pytest.raises(BadParameter, match="another server does"):
        listen(options)


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("mine")
    with pytest.raises(BadParameter, match="it is no socket"):
        listen(ServerOptions(host=f"unix:{file}"))
    assert file.read_text() == "mine"
    with pytest.raises(BadParameter, match="can't listen on"):
        listen(ServerOptions(host=f"unix:{tmp_path / 'no' / 's'}"))


def test_a_port_has_an_address_that_clients_take() -> None:
    options = ServerOptions(port=0)
    with listen(options) as bound:
        assert address_of(options, bound) == f"http://127.0.0.1:{bound.getsockname()[1]}/v1"


def test_a_port_is_taken_before_the_model_is_loaded() -> None:
    with listen(ServerOptions(port=0)) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(BadParameter, match=f"can't listen on 127.0.0.1:{port}"):
            listen(ServerOptions(port=port))
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
