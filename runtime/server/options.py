"""How the server is set up: flags, a TOML file, or both; a flag wins over the file."""

import ipaddress
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from serai.runtime.errors import BadParameter
from serai.runtime.server.callers import Key, quotas_of

UNIX = "unix:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Everything that can be set of the server itself.

    host, port            where to listen; only on this machine unless a key is asked for. A host unix:PATH is a
                          socket that only this user can reach
    api_keys              keys clients must send as `Authorization: Bearer KEY`; each has sessions of its own
    keys                  further keys, each with its namespace, quota, priority and deadline (`callers.Key`)
    log_level             of uvicorn and of serai
    max_request_bytes     larger request bodies are refused (413)
    max_active            requests at work at a time; further ones are refused (429)
    max_active_per_key    the same for one key
    keep_hot              places kept in memory to go on from at once; older ones are rebuilt from the store
    unstored_ttl_s        how long a response that is not to be stored can be gone on from
    keep_alive_s          a comment is sent on a stream that has been silent for so long
    slow_reader_s         a client that takes nothing for so long is let go
    arrive_s              a request that has not come whole after so long is given up
    early_headers_s       a stream's headers wait this long for its first event, so that errors get their own status
    stall_s               an engine that finishes no step for so long is reported dead
    shutdown_s            replies under way may go on for so long when the server is told to end
    stored_chats          whether chat completions can be gone on from when the client doesn't say `store`
    open_responses_names  events of reasoning get the names of Open Responses instead of OpenAI's
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    keys: tuple[Key, ...] = ()
    log_level: str = "info"
    max_request_bytes: int = 32 << 20
    max_active: int = 256
    max_active_per_key: int = 256
    keep_hot: int = 64
    unstored_ttl_s: float = 300.0
    keep_alive_s: float = 10.0
    slow_reader_s: float = 60.0
    arrive_s: float = 60.0
    early_headers_s: float = 1.0
    stall_s: float = 120.0
    shutdown_s: float = 10.0
    stored_chats: bool = True
    open_responses_names: bool = False

    def __post_init__(self) -> None:
        if not self.all_keys and self.socket_path is None and not is_loopback(self.host):
            raise BadParameter(
                f"host is {self.host}, which others can reach, and no key is set; give --api-key, or use 127.0.0.1"
            )
        secrets = [key.secret for key in self.all_keys]
        if len(set(secrets)) < len(secrets):
            raise BadParameter("the same API key is given twice; give each client its own")
        namespaces = {key.namespace for key in self.all_keys}
        if len(namespaces) > 1 and "" in namespaces:
            raise BadParameter("among several keys each needs a namespace with a name, and one has ''")
        quotas_of(self.all_keys)  # raises for two that contradict each other
        if not 0 <= self.port <= 65_535:
            raise BadParameter(f"port is {self.port}, but must be from 0 to 65535")
        for name in ("max_request_bytes", "max_active", "max_active_per_key", "keep_hot"):
            if getattr(self, name) < 1:
                raise BadParameter(f"{name} is {getattr(self, name)}, but must be at least 1")
        for name in (one.name for one in fields(self) if one.name.endswith("_s")):
            if not getattr(self, name) >= 0:
                raise BadParameter(f"{name} is {getattr(self, name)}, but must be 0 or more")
        for name in ("keep_alive_s", "slow_reader_s", "arrive_s"):
            if not getattr(self, name):
                raise BadParameter(f"{name} is 0, but must be more")

    @property
    def all_keys(self) -> tuple[Key, ...]:
        """Every key that opens the server; without any, whoever reaches it may ask."""
        return (*map(Key.plain, self.api_keys), *self.keys)

    @property
    def socket_path(self) -> str | None:
        """The path of the Unix socket that `host` names, if it names one."""
        return self.host.removeprefix(UNIX) if self.host.startswith(UNIX) else None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "ServerOptions":
        """From plain values, such as those of a file. Raises `BadParameter` for names and types that aren't options."""
        known = {field.name: field for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known:
                raise BadParameter(f"{name!r} is no option of the server; there are {', '.join(sorted(known))}")
            values[name] = _keys(value) if name == "keys" else _typed(name, value, known[name].default)
        return cls(**values)


SERVER_TABLE = "server"
"""Options of the server stand under this name in a file; those of the model (`model`, `budget`, …) above it."""


def read_options_file(path: Path) -> dict[str, Any]:
    """A TOML file as plain values."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadParameter(f"the options file {path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadParameter(f"the options file {path} is no TOML: {error}") from None


def parse_setting(text: str) -> dict[str, Any]:
    """One option as it could stand in a file's table, `NAME = VALUE`; text that is no TOML value is itself."""
    name, _, value = text.partition("=")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        if not name.strip() or not value:
            raise BadParameter(f"{text!r:.80} sets nothing; write NAME=VALUE") from None
        return {name.strip(): value.strip()}


def _keys(value: object) -> tuple[Key, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(one, Mapping) for one in value):
        raise BadParameter("keys must be tables: [[server.keys]] with key or key_env, and what else the key has")
    return tuple(map(Key.of, value))


def _typed(name: str, value: object, default: object) -> object:
    if isinstance(default, tuple):
        if isinstance(value, str) or not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise BadParameter(f"{name} must be a list of strings, and is {value!r:.60}")
        return tuple(value)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not type(default):
        raise BadParameter(f"{name} must be like {default!r}, and is {value!r:.60}")
    return value


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach, or be, that host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
