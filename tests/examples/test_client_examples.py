"""The clients' examples against a server that was really started, over a model that says what they expect.

`SERAI_CLIENTS_PYTHON` names another interpreter that has the clients installed, should this one lack them; with
`SERAI_CLIENTS_MUST_RUN` set, a missing one is a failure.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.server.started import scripted
from tests.shared import ROOT

PYTHON = os.environ.get("SERAI_CLIENTS_PYTHON", sys.executable)
CITY = "city='Paris' inhabitants=7"
SUNNY = "The tool says it is sunny."

EXPECTED = {
    "anthropic_client.py": (
        "anthropic",
        [
            "streamed: I have read 1 messages.",
            "thought in pieces: True",
            "called: [('weather', {'city': 'Paris'})] in pieces: True",
            f"answered: {SUNNY}",
            "as an object: [{'city': 'Paris', 'inhabitants': 7}]",
        ],
    ),
    "openai_client.py": (
        "openai",
        [
            "streamed: I have read 1 messages.",
            "called: [('weather', '{\"city\": \"Paris\"}')] in pieces: True",
            f"answered: {SUNNY}",
            f"as an object: {CITY}",
            "the response called in pieces: True",
            f"the response answered: {SUNNY} in 26 pieces that add up: True",
            f"the response as an object: {CITY}",
            "Is it even? I have read 2",
            "Is it prime? I have read 2",
            "Double it. I have read 2",
        ],
    ),
    "openai_agents.py": (
        "agents",
        [
            f"first: {SUNNY}",
            "in 2 responses",
            f"And in Rome? {SUNNY} (streamed: True)",
            f"And in Oslo? {SUNNY} (streamed: True)",
            f"as an object: {CITY}",
        ],
    ),
    "pydantic_ai_client.py": (
        "pydantic_ai",
        [
            line
            for by in ("chat", "responses")
            for line in (
                f"with a tool, by {by}: {SUNNY} in several pieces: True",
                f"as an object, by {by}: {CITY}",
                f"as streamed JSON, by {by}: {CITY}",
            )
        ],
    ),
    "langgraph_fork.py": (
        "langgraph",
        [
            f"first: {SUNNY}",
            f"forked: {SUNNY}",
            "the fork goes on from the first response: True",
            "which has 2 ways on",
            f"streamed: {SUNNY} in several pieces: True",
            f"as an object: {CITY}",
        ],
    ),
    "litellm_client.py": (
        "litellm",
        [
            "streamed: I have read 1 messages.",
            "called, streamed: [('weather', '{\"city\": \"Paris\"}')]",
            f"answered: {SUNNY}",
            f"as an object: {CITY}",
            "forked: I have read 2 messages.",
            "the response called, streamed: ['weather']",
            f"the response as an object: {CITY}",
        ],
    ),
}


def need(package: str) -> None:
    """Skip, or fail where it was promised, when the interpreter for clients lacks a package."""
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    if subprocess.run([PYTHON, "-c", probe], check=False).returncode != 0:
        missing = f"needs {package}; install serai[clients], or name an interpreter in SERAI_CLIENTS_PYTHON"
        if os.environ.get("SERAI_CLIENTS_MUST_RUN"):
            pytest.fail(missing)
        pytest.skip(missing)


def said_by(*arguments: str, cwd: Path) -> str:
    done = subprocess.run([PYTHON, *arguments], capture_output=True, text=True, cwd=cwd, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted(tmp_path_factory.mktemp("store")) as url:
        yield url


@pytest.mark.parametrize("example", sorted(EXPECTED))
def test_a_client_works_unmodified(example: str, server: str, tmp_path: Path) -> None:
    """With tools, streams and answers as objects."""
    package, expected = EXPECTED[example]
    need(package)
    said = said_by(str(ROOT / "examples" / example), server, cwd=tmp_path)
    for words in expected:
        assert words in said


def test_the_native_model_of_the_agents_sdk() -> None:
    for package in ("agents", "serai", "hypothesis"):
        need(package)
    seen = json.loads(said_by("-m", "tests.runtime.server.scripted_agents", cwd=ROOT))
    assert (seen["first"], seen["calls"]) == (SUNNY, ["weather"])
    (first, none_cached, first_out), (second, cached, second_out) = seen["turns"]
    assert none_cached == 0
    assert cached >= first + first_out - 1, "only the tool's result is read"
    assert first < cached < second
    assert min(first_out, second_out) > 0
    assert [fork[0] for fork in seen["forks"]] == [SUNNY] * 2
    for whole, pieces, count, begins, ends in seen["forks"]:
        assert (pieces, begins, ends) == (whole, "response.created", "response.completed")
        assert count > 1
    assert seen["fork_usage"] > second
    assert seen["ways_on"] == 2, "both forks go on from one response"
    assert seen["object"] == seen["streamed_object"] == {"city": "Paris", "inhabitants": 7}
    assert seen["after_leaving"] == [0, 0], "an agent that leaves a stream leaves nothing at work"
    temperature, unknown, broken = seen["errors"]
    assert "temperature" in temperature
    assert "no response" in unknown
    assert "a kernel broke" in broken


def test_the_native_model_with_nano(tmp_path: Path) -> None:
    need("agents")
    need("serai")
    said = said_by(str(ROOT / "examples" / "native_agents.py"), cwd=tmp_path)
    assert "2 requests, " in said
    assert said.count("pieces: True") == 2
    assert "as an object: city=" in said
