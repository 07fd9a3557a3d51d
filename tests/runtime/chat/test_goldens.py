"""Whole prompts, segment by segment: against K3's own encoder where its goldens are at hand, and against ours always.

Ours were written by hand from the description of the formats. In them a prompt is one string: segments are separated by
a broken bar, and markup stands in angle brackets ⟨ ⟩.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serai.runtime.chat import (
    ImagePart,
    Markup,
    Message,
    Notes,
    PromptOptions,
    Segment,
    TextPart,
    read_messages,
    read_tools,
    render,
)
from serai.runtime.chat.k2 import K2Markup
from serai.runtime.chat.k3 import K3Markup
from tests.runtime.chat.tokenizers_for_tests import PLACEHOLDER
from tests.shared import SHARED, shared

OURS = Path(__file__).parents[2] / "data" / "chat"


def _cases(path: Path) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return cases


def _upstream_cases() -> list[dict[str, Any]]:
    return _cases(SHARED / "goldens" / "xtml" / "cases.json") if SHARED else []


def _render(markup: Markup, case: dict[str, Any], messages: tuple[Message, ...], *, thinking: bool) -> list[Segment]:
    options = PromptOptions(read_tools(case.get("tools")), thinking, case.get("thinking_effort"))
    notes = Notes(case.get("tool_choice"), case.get("response_format"))
    generate = case.get("add_generation_prompt", True)
    return list(render(markup, messages, options, notes, add_generation_prompt=generate).segments)


def _with_images(messages: tuple[Message, ...], prompts: list[str]) -> tuple[Message, ...]:
    """Upstream is handed finished slots for its image parts and placeholders; here an image is a part with a size."""
    sizes = [re.search(r"(\d+)x(\d+)", prompt) for prompt in prompts]
    images = [ImagePart("", int(size[1]), int(size[2])) for size in sizes if size]
    result = []
    for message in messages:
        parts: list[TextPart | ImagePart] = []
        for part in message.parts:
            if isinstance(part, ImagePart):
                parts.append(images.pop(0))
                continue
            for place, text in enumerate(part.text.split(PLACEHOLDER)):
                parts += [images.pop(0)] if place else []
                parts.append(TextPart(text))
        result.append(replace(message, parts=tuple(parts)))
    return tuple(result)


def test_k3s_own_goldens_are_at_hand() -> None:
    assert len(_cases(shared("goldens", "xtml", "cases.json"))) == 26


@pytest.mark.parametrize("case", _upstream_cases(), ids=lambda case: str(case["name"]))
def test_k3_prompts_are_those_of_its_own_encoder(case: dict[str, Any]) -> None:
    arguments = case["arguments"]
    messages = read_messages(arguments["messages"])
    if "image_prompts" in arguments:
        messages = _with_images(messages, arguments["image_prompts"])
    segments = _render(K3Markup(), arguments, messages, thinking=arguments.get("thinking", True))
    assert [[segment.text, segment.markup] for segment in segments] == case["segments"]


def _spelled(segments: list[Segment]) -> str:
    return "¦".join(f"⟨{segment.text}⟩" if segment.markup else segment.text for segment in segments)


@pytest.mark.parametrize("case", _cases(OURS / "k3_prompts.json"), ids=lambda case: str(case["name"]))
def test_k3_prompts_are_as_written_by_hand(case: dict[str, Any]) -> None:
    messages = read_messages(case["messages"])
    assert _spelled(_render(K3Markup(), case, messages, thinking=case.get("thinking", True))) == case["segments"]


@pytest.mark.parametrize("case", _cases(OURS / "k2_prompts.json"), ids=lambda case: str(case["name"]))
def test_k2_prompts_are_as_written_by_hand(case: dict[str, Any]) -> None:
    """B94"""
    assert _spelled(_render(K2Markup(), case, read_messages(case["messages"]), thinking=False)) == case["segments"]
