"""The README's picture of the monitor is drawn from a captured screen, escapes and all."""

from xml.etree import ElementTree

from examples.monitor_picture import svg


def test_a_captured_screen_becomes_a_picture_that_holds_its_text() -> None:
    drawn = svg(["\x1b[1mplanner\x1b[0m <live>", "12 sessions"], "serai monitor")
    text = "".join(ElementTree.fromstring(drawn).itertext()).replace("\xa0", " ")
    assert "planner" in text
    assert "<live>" in text
    assert "12 sessions" in text
    assert drawn == svg(["\x1b[1mplanner\x1b[0m <live>", "12 sessions"], "serai monitor")
