"""The README's picture of the monitor is drawn by the real program, and looks the same every time."""

from xml.etree import ElementTree

import pytest

from examples.monitor_picture import picture

pytestmark = pytest.mark.anyio


async def test_the_picture_is_repeatable_and_shows_the_sessions() -> None:
    drawn = await picture(None)
    text = "".join(ElementTree.fromstring(drawn).itertext()).replace("\xa0", " ")
    assert "12 sessions" in text
    assert "planner" in text
    assert "● live" in text
    assert await picture(None) == drawn
