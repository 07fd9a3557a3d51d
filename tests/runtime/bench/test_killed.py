"""Processes killed at token boundaries: nano loses nothing, and a difference is found and named."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from serai.runtime.bench import killed
from serai.runtime.bench.killed import EVERY_KIND, TOKENS, Relay, Seen, parts_between, relay
from serai.runtime.models.locate import BUILT_IN
from serai.runtime.models.open_model import Precision
from serai.runtime.sampling.params import SamplingParams

NANO = BUILT_IN["nano"]
FEW = (1, 125, 300)


@pytest.mark.parametrize(("precision", "boundaries"), [(Precision.FAST, EVERY_KIND), (Precision.EXACT, FEW)])
def test_processes_killed_where_they_saved_lose_no_bit(
    tmp_path: Path, precision: Precision, boundaries: tuple[int, ...]
) -> None:
    """B42, B43, B60: one boundary of each kind; `serai bench faults` kills at every one of the 301, in both."""
    told: list[str] = []
    assert relay(NANO, tmp_path, precision, boundaries, tell=told.append) == Relay(
        len(boundaries), len(boundaries), None
    )


def test_a_session_that_goes_on_otherwise_is_found_where_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes draw with another seed than what they are compared to, after the hundredth token."""
    *parts, drawn, read = killed.MIXED
    assert isinstance(drawn, SamplingParams)
    monkeypatch.setattr(killed, "MIXED", (*parts, replace(drawn, seed=9), read))
    found = relay(NANO, tmp_path, Precision.FAST, (100, 150, 250), tell=lambda _: None)
    assert found == Relay(3, 1, "fast, process 3, from boundary 150 to 250: other tokens where it saved")


def test_a_difference_where_it_resumes_and_a_token_read_anew_are_named() -> None:
    before, after = Seen("t", "l"), Seen("tt", "ll")
    said = {"resumed": asdict(before), "saved": asdict(after), "read_anew": 0, "point": "p"}
    assert killed.difference(said, before, after) is None
    assert killed.difference(said | {"resumed": asdict(after)}, before, after) == "other tokens where it resumed"
    assert killed.difference(said | {"saved": {"tokens": "tt", "logits": "l"}}, before, after) == (
        "other logits where it saved"
    )
    assert killed.difference(said | {"read_anew": 200}, before, after) == "200 tokens were read anew"
    assert killed.difference(said | {"read_anew": 200}, None, after) is None, "the first process reads the prompt"


def test_a_process_that_is_not_killed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = killed.killed(tmp_path / "nothing", tmp_path / "store", Precision.FAST, "", 0, 1)
    assert isinstance(said, str)
    assert "left with 1 and was not killed: " in said
    assert "nothing" in said
    monkeypatch.setattr(killed, "GIVE_UP_AFTER_S", 0.01)
    said = killed.killed(NANO, tmp_path / "store", Precision.FAST, "", 0, 1)
    assert said == "the process had not saved after 0.01 s"


def test_the_parts_between_boundaries_are_the_whole_way() -> None:
    lengths = [
        sum(
            part.max_tokens or 0 if isinstance(part, SamplingParams) else len(part)
            for part in parts_between(start, end)
        )
        for start, end in ((0, 0), (0, TOKENS), (57, 260), (149, 151))
    ]
    assert lengths == [0, 300, 203, 2]
