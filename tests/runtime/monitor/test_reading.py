"""A status survives JSON, and nothing else passes for one."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from serai.runtime.memory.attention import PUBLISHED
from serai.runtime.monitor.reading import (
    StatusUnreadable,
    about_from_json,
    detail_from_json,
    event_from_json,
    status_from_json,
)
from serai.runtime.monitor.source import About
from serai.runtime.monitor.transcript import Voice
from serai.runtime.sessions.events import EventKind
from tests.runtime.monitor.scripted import DETAIL, event, status


def changed(path: str, value: object) -> Any:
    body = json.loads(json.dumps(status().to_json()))
    *way, last = path.split(".")
    where = body
    for step in way:
        where = where[int(step)] if step.isdigit() else where[step]
    where[last] = value
    return body


@pytest.mark.parametrize("experts", [True, False])
def test_a_status_comes_back_from_its_json(experts: bool) -> None:
    made = status() if experts else status(experts=None)
    assert status_from_json(json.loads(json.dumps(made.to_json()))) == made


def test_whole_numbers_are_seconds_too_and_unknown_fields_are_ignored() -> None:
    assert status_from_json(changed("now_s", 5)).now_s == 5.0
    assert status_from_json(changed("budget.novelty", "x")) == status()


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("budget", None, "budget must be an object, not None"),
        ("budget.trunk_bytes", 1.5, "budget.trunk_bytes must be int, not 1.5"),
        ("budget.trunk_bytes", True, "budget.trunk_bytes must be int, not True"),
        ("budget.trunk_bytes", 10**400, "budget.trunk_bytes must be int"),
        ("now_s", float("nan"), "now_s must be float, not nan"),
        ("work.loop_delay_p99_s", float("inf"), "work.loop_delay_p99_s must be float, not inf"),
        ("sessions", {}, "sessions must be a list, not {}"),
        ("sessions.1.label", None, "sessions[1].label must be str, not None"),
        ("sessions.0.doing", 3, "sessions[0].doing must be str or null, not 3"),
        ("experts.layers.3.heat", 5, "experts.layers[3].heat must be str, not 5"),
        ("experts.layers", None, "experts.layers must be a list, not None"),
        ("experts", [], "experts must be an object, not []"),
    ],
)
def test_what_is_wrong_is_named(path: str, value: object, told: str) -> None:
    with pytest.raises(StatusUnreadable) as caught:
        status_from_json(changed(path, value))
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize("body", [None, [], "status", 3, {}])
def test_other_json_is_no_status(body: object) -> None:
    with pytest.raises(StatusUnreadable):
        status_from_json(body)


def test_events_details_and_comparisons_come_back_too() -> None:
    made = event(EventKind.DEMOTED, "a", "why", missed=2)
    body = asdict(made) | {"kind": made.kind.value}
    assert event_from_json(body) == made
    assert event_from_json(body | {"kind": "of next year"}) is None
    costs = [asdict(cost) for cost in PUBLISHED]
    assert about_from_json({"comparison": costs}) == About(PUBLISHED, may_act=True)
    assert about_from_json({"comparison": [], "may_act": False}) == About(may_act=False)
    assert detail_from_json(json.loads(json.dumps(DETAIL.to_json()))) == DETAIL
    for read in (about_from_json, detail_from_json):
        with pytest.raises(StatusUnreadable):
            read({})


def test_a_voice_of_next_year_is_plain_text() -> None:
    body = DETAIL.to_json()
    body["passages"][0]["voice"] = "song"
    assert detail_from_json(body).passages[0].voice is Voice.TEXT
