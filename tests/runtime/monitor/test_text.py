"""Text from strangers is made printable and fits where it is put, whatever it is."""

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from serai.runtime.monitor.text import Span, Tone, cut, fit, fit_right, printable, text_of

ANY_TEXT = st.text(st.characters(), max_size=60) | st.text(
    "[]\x1b\u200b\u202e字👩\u200d\ud800\ufe0f\u0301 a\n", max_size=40
)


@given(ANY_TEXT)
def test_what_is_printable_can_be_written_and_stays_on_its_line(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert "\n" not in shown
    shown.encode("utf-8")
    assert printable(shown) == shown


@given(ANY_TEXT, st.integers(0, 30))
def test_fitted_text_is_exactly_as_wide_as_asked(text: str, cells: int) -> None:
    assert cell_len(fit(text, cells)) == cells
    assert cell_len(fit_right(text, cells)) == cells


def test_control_characters_are_shown_as_their_pictures() -> None:
    """B110."""
    assert printable("[00] x [/ [b [/bold]") == "[00] x [/ [b [/bold]"
    assert printable("\x1b[2J\n\x00\x7f") == "␛[2J␊␀␡"
    assert printable("a\u202eb\u200bc\x9bd\ud800") == "a\\u202eb\\u200bc\\u009bd\\ud800"
    assert printable("\U000e0041") == "\\U000e0041"


def test_what_was_cut_says_so() -> None:
    assert fit("caravanserai", 6) == "carav…"
    assert fit("字字字", 4) == "字 …"
    assert fit("abc", 5) == "abc  "
    assert fit_right("12", 5) == "   12"


def test_a_line_is_cut_between_and_within_spans() -> None:
    spans = (Span("abc"), Span("defg", Tone.BAD), Span("h"))
    assert text_of(cut(spans, 8)) == "abcdefgh"
    assert cut(spans, 5) == (Span("abc"), Span("d…", Tone.BAD))
    assert cut(spans, 3) == (Span("abc"),)
