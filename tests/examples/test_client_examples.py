"""The clients' examples against a server that was really started, over a model that says what they expect.

`SERAI_CLIENTS_PYTHON` names another interpreter that has the clients installed, should this one lack them.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.server.started import scripted
from tests.shared import ROOT

PYTHON = os.environ.get("SERAI_CLIENTS_PYTHON", sys.executable)

EXPECTED = {
    "openai_client.py": ("openai", ["streamed: I have read 1", "called: [('weather'", "Double it. I have read 2"]),
    "openai_agents.py": ("agents", ["first: The tool says it is sunny.", "And in Oslo? The tool says it is sunny."]),
    "pydantic_ai_client.py": (
        "pydantic_ai",
        ["with a tool: The tool says", "as an object: city='Paris'", "by responses"],
    ),
    "langgraph_fork.py": ("langgraph", ["the fork goes on from the first response: True"]),
    "litellm_client.py": ("litellm", ["streamed: I have read 1", "forked: I have read 2"]),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted(tmp_path_factory.mktemp("store")) as url:
        yield url


@pytest.mark.parametrize("example", sorted(EXPECTED))
def test_a_client_works_unmodified(example: str, server: str, tmp_path: Path) -> None:
    package, expected = EXPECTED[example]
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    if subprocess.run([PYTHON, "-c", probe], check=False).returncode != 0:
        pytest.skip(f"needs {package}; install serai[clients], or name an interpreter in SERAI_CLIENTS_PYTHON")
    command = [PYTHON, str(ROOT / "examples" / example), server]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for words in expected:
        assert words in done.stdout
