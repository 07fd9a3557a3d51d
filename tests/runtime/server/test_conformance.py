"""The specifications' own test of a server (`llm-comply`: Open Responses of 2026-04-24, OpenAI's chat completions)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.server.started import scripted

EXCEPTIONS = {"image-input": "HTTP 400", "chat-image-input": "HTTP 400"}
"""The README says why: there is no vision tower here, so an image is refused instead of being left out in silence."""

NAMES_OF_OPENAI = "unknown SSE event type: response.reasoning_text"
"""By default events of reasoning have OpenAI's names, which Open Responses doesn't know; an option gives its own."""


def failures(url: str, form: str, *more: str) -> dict[str, list[str]]:
    """The errors of each test that failed."""
    command = [sys.executable, "-m", "llm_comply.cli", "-u", url, "-k", "none", "-m", "scripted"]
    done = subprocess.run(
        [*command, "--format", form, "--json", *more], capture_output=True, text=True, timeout=120, check=False
    )
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert report["summary"]["passed"] >= 7, report
    return {one["id"]: one["errors"] for one in report["results"] if one["status"] == "failed"}


@pytest.mark.parametrize(
    ("form", "options"), [("open-responses", ["--open-responses-names"]), ("openai-chat", []), ("open-responses", [])]
)
def test_nothing_fails_but_what_the_readme_names(form: str, options: list[str], tmp_path: Path) -> None:
    with scripted(tmp_path / "store", *options) as url:
        told = failures(url, form)
    if form == "open-responses" and not options:
        named = {id_: errors for id_, errors in told.items() if id_ not in EXCEPTIONS}
        assert named, "the default names are OpenAI's"
        assert all(error.startswith(NAMES_OF_OPENAI) for errors in named.values() for error in errors)
        told = {id_: errors for id_, errors in told.items() if id_ in EXCEPTIONS}
    assert len(told) == 1
    assert told.keys() <= EXCEPTIONS.keys()
    assert all(errors[0].startswith(EXCEPTIONS[id_]) for id_, errors in told.items())
