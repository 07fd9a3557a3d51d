"""Stop strings: every character shown as early as possible, none of a stop string ever."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.runtime.errors import BadParameter
from serai.runtime.text.stops import StopMatcher

SMALL = st.text("abé", max_size=24)
STOPS = st.lists(st.text("abé", min_size=1, max_size=5), max_size=4)


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """What was shown piece by piece, the last one at the end, and the stop string that ended it."""
    matcher = StopMatcher(stops)
    shown = []
    for piece in pieces:
        visible, stopped = matcher.push(piece)
        shown.append(visible)
        if stopped:
            break
    else:
        shown.append(matcher.finish())
    assert matcher.visible_chars == len("".join(shown))
    return shown, matcher.stopped_by


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def by_definition(stops: list[str], text: str) -> tuple[str, str | None]:
    """The stop that is complete first, the longest of those, found by looking at every place."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(STOPS, SMALL, st.lists(st.integers(0, 100), max_size=8))
def test_any_chunking_shows_what_the_whole_text_shows(stops: list[str], text: str, places: list[int]) -> None:
    """B85: earliest match, overlapping stops, stops across pieces."""
    shown, stopped_by = run(stops, cut(text, places))
    assert ("".join(shown), stopped_by) == by_definition(stops, text)


@given(STOPS, SMALL)
def test_nothing_is_held_that_cannot_begin_a_stop_string(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    for char in text:
        _, stopped = matcher.push(char)
        if stopped:
            assert matcher.held == ""
            return
        assert matcher.held == "" or any(stop.startswith(matcher.held) for stop in stops)


@given(STOPS, SMALL, SMALL)
def test_text_that_goes_on_after_a_finish_is_shown_once_and_still_watched(
    stops: list[str], first: str, second: str
) -> None:
    """A generation may end by length inside what could become a stop string, and a later one completes it."""
    matcher = StopMatcher(stops)
    before, stopped = matcher.push(first)
    if stopped:
        return
    before += matcher.finish()
    assert before == first
    after, stopped = matcher.push(second)
    if not stopped:
        after += matcher.finish()
    visible, stopped_by = by_definition(stops, first + second)
    assert (matcher.stopped_by, stopped) == (stopped_by, stopped_by is not None)
    assert before + after == (visible if len(visible) > len(first) else first)


def test_a_stop_string_across_tokens_is_not_shown_at_all() -> None:
    """B85."""
    assert run(["own fox"], ["The quick br", "own f", "ox"]) == (["The quick br", "", ""], "own fox")


def test_a_stop_string_that_is_never_completed_is_shown_in_full() -> None:
    """B85."""
    shown, stopped_by = run(["own fox"], ["The quick br", "own f", "ig"])
    assert ("".join(shown), stopped_by) == ("The quick brown fig", None)


def test_a_held_beginning_is_flushed_when_the_text_ends() -> None:
    """B86."""
    assert run(["assistant"], ["ple", "as"]) == (["ple", "", "as"], None)


def test_a_stop_string_within_one_piece_hides_what_follows_it() -> None:
    assert run(["\n\n"], ["one\n", "\ntwo"]) == (["one", ""], "\n\n")


def test_after_a_false_start_a_later_start_inside_it_still_counts() -> None:
    assert run(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], "aab")


def test_of_stops_that_end_together_the_longest_wins() -> None:
    assert run(["c", "bc", "abd"], ["xab", "c"]) == (["x", "a"], "bc")


def test_once_stopped_nothing_more_is_shown() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == ("a", True)
    assert matcher.push("c") == ("", True)
    assert matcher.finish() == ""
    assert matcher.visible_chars == 1


def test_without_stops_everything_passes() -> None:
    assert run([], ["a", "", "é"]) == (["a", "", "é", ""], None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(BadParameter, match="at least one character"):
        StopMatcher(["a", ""])
