"""What a server that can't serve says, before anybody can reach it."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from serai.runtime.bench.tiny import write_tiny_model
from tests.shared import ROOT


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def refusal(model: str | Path, store: Path, *arguments: str) -> str:
    """What `serai serve` says as it ends; nobody could connect to it meanwhile."""
    port = free_port()
    command = [sys.executable, "-m", "serai.runtime", "serve", str(model), "--store", str(store), "--port", str(port)]
    with subprocess.Popen([*command, *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            with socket.socket() as asking:
                assert asking.connect_ex(("127.0.0.1", port)) != 0, "it listens, though it has nothing to serve"
            try:
                process.wait(timeout=0.05)
            except subprocess.TimeoutExpired:
                continue
        said = "" if process.stderr is None else process.stderr.read()
    assert process.returncode == 1, said
    assert said.startswith("serai: ")
    assert said.count("\n") == 1, said
    return said


def test_a_model_that_is_not_there_is_said_before_listening(tmp_path: Path) -> None:
    """B16"""
    assert "no-such" in refusal(tmp_path / "no-such", tmp_path / "s")
    assert not (tmp_path / "s").exists(), "nor was a store made for it"


@pytest.mark.parametrize("wrong", ["shard", "config", "tensor"])
def test_a_model_that_is_wrong_is_said_before_listening(wrong: str, tmp_path: Path) -> None:
    """B16: a shard that the index names and the disk lacks, a configuration that says nothing, a tensor left out."""
    folder = tmp_path / "model"
    write_tiny_model(folder, shards=2)
    if wrong == "shard":
        gone = sorted(folder.glob("*.safetensors"))[1]
        gone.unlink()
        named = gone.name
    elif wrong == "config":
        (folder / "config.json").write_text("{}")
        named = "config.json"
    else:
        named = "embed_tokens"
        for file in sorted(folder.glob("model*")):
            file.write_bytes(file.read_bytes().replace(named.encode(), b"embed_nobody"))
    assert named in refusal(folder, tmp_path / "s")


def test_a_public_address_without_a_key_is_refused(tmp_path: Path) -> None:
    assert "no key is set" in refusal("nano", tmp_path / "s", "--host", "0.0.0.0")
