"""`serai sessions` over a store on disk: looking, keeping in order, moving; errors are one sentence."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serai.checkpoints import NodeRecord, Store
from serai.checkpoints.harness.samples import FINGERPRINT, sample_node, sample_state
from serai.checkpoints.moving.ownership import begin_move
from serai.runtime.cli.main import app

runner = CliRunner()


@dataclass(frozen=True)
class Stored:
    """A store with one session of three nodes (states at the first two), and another that goes on from the first."""

    folder: Path
    first: NodeRecord
    middle: NodeRecord
    last: NodeRecord
    fork: NodeRecord

    @property
    def session(self) -> str:
        return self.first.session_id


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    folder = tmp_path / "store"
    with Store.open(str(folder)) as store:
        first = sample_node(8)
        middle = sample_node(4, first)
        last = sample_node(2, middle)
        fork = sample_node(3, first, session_id="b" * 26)
        for number, node in enumerate((first, middle, last, fork)):
            store.record(node)
            if node is not last:
                store.save(node.id, sample_state(node.position, number), FINGERPRINT, reason="test")
        store.tag("start", first.id)
    return Stored(folder, first, middle, last, fork)


def told(stored: Stored | Path, command: str, *arguments: str) -> dict[str, Any]:
    """What the command says with --json; every part of it."""
    folder = stored if isinstance(stored, Path) else stored.folder
    result = runner.invoke(app, ["sessions", command, *arguments, "--store", str(folder), "--json"])
    assert result.exit_code == 0, result.stderr
    values = json.loads(result.stdout)
    assert isinstance(values, dict)
    return values


def refused(stored: Stored | Path, command: str, *arguments: str) -> tuple[str, str]:
    """The kind of error and its one sentence."""
    folder = stored if isinstance(stored, Path) else stored.folder
    result = runner.invoke(app, ["sessions", command, *arguments, "--store", str(folder), "--json"])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.stderr
    error = json.loads(result.stdout)["error"]
    return error["kind"], error["message"]


def people(stored: Stored, command: str, *arguments: str, answer: str | None = None) -> str:
    result = runner.invoke(app, ["sessions", command, *arguments, "--store", str(stored.folder)], input=answer)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_sessions_are_listed_with_what_they_take(stored: Stored) -> None:
    listed = told(stored, "ls")
    assert [(one["session_id"], one["position"], one["has_snapshot"]) for one in listed["sessions"]] == [
        (stored.session, 14, False),
        ("b" * 26, 11, True),
    ]
    assert listed["tags"] == {"start": stored.first.id}
    assert listed["sizes"]["snapshots"] == 3
    seen = people(stored, "ls")
    assert all(name in seen for name in (stored.session, stored.first.id, "2 sessions, 3 states"))


def test_a_point_is_shown_with_its_history_and_the_state_it_would_start_from(stored: Stored) -> None:
    shown = told(stored, "show", stored.session)
    assert [(step["id"], step["has_snapshot"], step["tags"]) for step in shown["path"]] == [
        (stored.first.id, True, ["start"]),
        (stored.middle.id, True, []),
        (stored.last.id, False, []),
    ]
    assert (shown["state"]["node"], shown["replay_tokens"]) == (stored.middle.id, 2)
    assert shown["state"]["fingerprint"]["weights"] == "weights-a"
    assert shown["node"]["metadata"] == {"note": "größer"}
    assert told(stored, "show", "start")["node"]["children"] == [stored.middle.id, stored.fork.id]
    assert "2 tokens after it are replayed" in " ".join(people(stored, "show", stored.session).split())


def test_two_points_are_compared_by_tokens_and_bytes(stored: Stored) -> None:
    found = told(stored, "diff", stored.middle.id, "b" * 26)
    assert (found["positions"], found["common_node"]) == ([12, 11], stored.first.id)
    assert found["common_tokens"] == 11  # sample nodes count their tokens up, so the shorter one is a beginning
    assert "Tokens" in people(stored, "diff", "start", stored.session)


def test_looking_is_possible_beside_the_process_that_has_the_store(stored: Stored) -> None:
    with Store.open(str(stored.folder)):
        assert len(told(stored, "ls")["sessions"]) == 2
        assert told(stored, "tree")["sessions"][1]["parent"] == stored.session
        kind, message = refused(stored, "gc")
        assert kind == "StoreBusy"
        assert "close it there" in message


def test_resume_says_the_command_with_the_precision_of_the_state(stored: Stored) -> None:
    how = told(stored, "resume", stored.session)
    assert how["command"] == f"serai run MODEL --resume {stored.last.id} --store {stored.folder} --precision exact"
    assert (how["position"], how["replay_tokens"]) == (14, 2)
    assert people(stored, "resume", stored.session).splitlines()[-1] == how["command"]
    with Store.open(str(stored.folder)) as store:
        begin_move(store, stored.session, "elsewhere")
    assert refused(stored, "resume", stored.session)[0] == "NotOwner"


def test_resume_with_a_model_goes_on_as_run_does(nano: Path, tmp_path: Path) -> None:
    arguments = ["The road", "--store", str(tmp_path), "--max-tokens", "2", "--ignore-eos", "--json"]
    ran = runner.invoke(app, ["run", str(nano), *arguments])
    first = json.loads(ran.stdout)
    went_on = told(tmp_path, "resume", first["resume"], str(nano))
    assert (went_on["session"], went_on["precision"]) == (first["session"], "fast")
    assert went_on["position"] > first["position"]


def test_erasing_asks_first_and_leaves_what_others_continue_from(stored: Stored) -> None:
    arguments = ["sessions", "rm", stored.session, "--store", str(stored.folder)]
    asked = runner.invoke(app, arguments, input="n\n")
    assert asked.exit_code == 1
    assert f"erase session {stored.session} (14 tokens, 3 nodes, 1 of them tagged), for good?" in asked.stderr
    assert len(told(stored, "ls")["sessions"]) == 2
    agreed = runner.invoke(app, arguments, input="y\n")
    assert agreed.exit_code == 0
    assert "erased 2 nodes and 2 states" in agreed.stdout
    assert told(stored, "show", "b" * 26)["path"][0]["id"] == stored.first.id


def test_one_node_is_erased_unless_another_continues_from_it(stored: Stored) -> None:
    assert refused(stored, "rm", stored.middle.id, "--yes")[0] == "NodeInUse"
    assert told(stored, "rm", stored.last.id, "--yes")["nodes"] == 1
    kind, message = refused(stored, "rm", "start", "--yes")
    assert kind == "BadParameter"
    assert "tag --remove" in message


def test_tags_are_given_moved_and_taken_away(stored: Stored) -> None:
    given = {"tag": "here", "node": stored.last.id, "before": None, "note": ""}
    assert told(stored, "tag", "here", stored.session) == given
    assert told(stored, "tag", "here", "start")["before"] == stored.last.id
    told(stored, "tag", "here", "start", "--note", "before [bold]the[/] answer")
    assert told(stored, "ls")["notes"] == {"start": "", "here": "before [bold]the[/] answer"}
    assert told(stored, "show", "here")["node"]["notes"]["here"] == "before [bold]the[/] answer"
    assert refused(stored, "tag", "here", "start", "--note", "two\nlines")[0] == "NameInvalid"
    assert refused(stored, "tag", "--remove", "here", "--note", "x")[0] == "BadParameter"
    assert told(stored, "tag", "--remove", "here")["node"] is None
    assert set(told(stored, "ls")["tags"]) == {"start"}
    assert refused(stored, "tag", "here")[0] == "BadParameter"
    assert refused(stored, "tag", "a" * 26, "start")[0] == "NameInvalid"
    assert refused(stored, "tag", "--remove", "here")[0] == "SessionGone"


def test_a_session_goes_through_one_file_into_a_store_that_is_made_for_it(stored: Stored, tmp_path: Path) -> None:
    file, there = tmp_path / "session.bundle", tmp_path / "there"
    written = told(stored, "export", stored.session, str(file))
    assert written["bytes"] == file.stat().st_size
    came = told(there, "import", str(file))
    assert (came["node_id"], came["nodes"], came["snapshots"]) == (stored.last.id, 3, 1)
    assert told(there, "import", str(file))["parts"] == 0
    assert told(there, "show", stored.last.id)["replay_tokens"] == 2
    assert [path.name for path in tmp_path.iterdir() if "unfinished" in path.name] == []


def test_a_session_goes_through_a_pipe(stored: Stored, tmp_path: Path) -> None:
    out = runner.invoke(app, ["sessions", "export", "start", "-", "--store", str(stored.folder)])
    assert out.exit_code == 0, out.stderr
    there = str(tmp_path / "there")
    came = runner.invoke(app, ["sessions", "import", "-", "--store", there, "--json"], input=out.stdout_bytes)
    assert came.exit_code == 0, came.stderr
    assert json.loads(came.stdout)["node_id"] == stored.first.id
    assert refused(stored, "export", "start", "-")[0] == "BadParameter"


def test_what_cannot_be_moved_is_one_sentence_and_leaves_no_file(stored: Stored, tmp_path: Path) -> None:
    assert refused(stored, "export", "nobody", str(tmp_path / "x"))[0] == "SessionGone"
    assert refused(stored, "export", "start", str(tmp_path / "no" / "x"))[0] == "BadParameter"
    (tmp_path / "taken").mkdir()
    assert refused(stored, "export", "start", str(tmp_path / "taken"))[0] == "BadParameter"
    assert refused(stored, "import", str(tmp_path / "nothing"))[0] == "BadParameter"
    told(stored, "export", "start", str(tmp_path / "whole"))
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:-100])
    assert refused(tmp_path / "there", "import", str(tmp_path / "cut"))[0] == "TransferBroken"
    (tmp_path / "other").write_bytes(b"something else, and long enough to have a header")
    assert refused(tmp_path / "there", "import", str(tmp_path / "other"))[0] == "SnapshotCorrupt"
    assert told(tmp_path / "there", "ls")["sessions"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "other", "store", "taken", "there", "whole"]


def test_a_session_is_pushed_once_and_pulled_by_its_id(stored: Stored, tmp_path: Path) -> None:
    place, there = f"file://{tmp_path}/place", tmp_path / "there"
    assert told(stored, "push", stored.session, place)["parts"] > 0
    assert told(stored, "push", stored.session, place)["parts"] == 0
    assert told(there, "pull", stored.last.id, place)["nodes"] == 3
    assert refused(there, "pull", "b" * 26, place)[0] == "SessionGone"
    assert refused(stored, "push", "start", "nothing-like-this://x/y")[0] == "PlaceUnknown"


def test_a_session_goes_straight_from_store_to_store(stored: Stored, tmp_path: Path) -> None:
    """What is in a store's folder is never taken for a place, nor written beside its index."""
    there = tmp_path / "there"
    assert told(there, "pull", stored.session, str(stored.folder))["node_id"] == stored.last.id
    assert told(there, "fsck") | {"nodes": 3} == told(there, "fsck")
    third = tmp_path / "third"
    assert refused(third, "pull", "start", f"file://{stored.folder}")[0] == "PlaceUnknown"
    told(third, "pull", "start", str(stored.folder))
    sent = told(stored, "push", stored.session, str(third))
    assert (sent["node_id"], sent["nodes"]) == (stored.last.id, 2)
    assert not (third / "points").exists()
    assert told(third, "fsck")["orphans"] == []
    moved = told(stored, "push", stored.session, str(there), "--move")
    assert moved["handed_over"]
    assert told(there, "settle", stored.session)["status"] == "owned"
    assert told(stored, "settle", stored.session)["status"] == "moved"


def test_a_place_needs_a_package_and_says_which(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    kind, message = refused(stored, "push", "start", "s3://bucket/folder")
    assert kind == "PlaceUnknown"
    assert "fsspec" in message


def test_collecting_keeps_heads_and_tags_and_asks_before_erasing_tokens(stored: Stored) -> None:
    assert told(stored, "gc")["snapshots"] == 0
    assert told(stored, "gc", "--states", "0")["snapshots"] == 1  # the middle one: no head, no tag
    arguments = ["sessions", "gc", "--session-days", "0", "--store", str(stored.folder)]
    asked = runner.invoke(app, arguments, input="n\n")
    assert asked.exit_code == 1
    assert "erase 2 sessions without activity for 0 days, for good?" in asked.stderr
    assert told(stored, "gc", "--session-days", "0", "--yes")["sessions"] == 2
    assert [one["head_id"] for one in told(stored, "ls")["sessions"]] == [stored.first.id]  # tagged
    assert refused(stored, "gc", "--max-size", "many")[0] == "BadParameter"


def test_damage_is_found_told_and_fails_the_check(stored: Stored) -> None:
    assert told(stored, "fsck")["clean"]
    part = next(path for path in (stored.folder / "parts").rglob("*") if path.is_file())
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    result = runner.invoke(app, ["sessions", "fsck", "--store", str(stored.folder), "--json"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["clean"]
    assert result.stderr.count("\n") == len(found["problems"]) > 0


def test_a_lost_index_is_rebuilt(stored: Stored) -> None:
    for file in stored.folder.glob("index.sqlite*"):
        file.unlink()
    kind, message = refused(stored, "fsck")
    assert kind == "StoreInvalid"
    assert "serai sessions fsck --rebuild" in message
    assert told(stored, "fsck", "--rebuild")["clean"]
    assert len(told(stored, "ls")["sessions"]) == 2


@pytest.mark.parametrize(
    "command", [["ls"], ["show", "x"], ["tree"], ["gc"], ["rm", "x"], ["fsck"], ["fsck", "--rebuild"]]
)
def test_a_folder_that_is_no_store_is_named(command: list[str], tmp_path: Path) -> None:
    kind, message = refused(tmp_path / "nothing", *command)
    assert kind == "StoreInvalid"
    assert str(tmp_path / "nothing") in message
    assert not (tmp_path / "nothing").exists()


def test_a_session_changes_hands_and_back_is_a_persons_word(stored: Stored, tmp_path: Path) -> None:
    place, there = f"file://{tmp_path}/place", tmp_path / "there"
    assert "point within session" in refused(stored, "push", "start", place, "--move")[1]
    assert told(stored, "settle", stored.session)["status"] == "owned"
    moved = told(stored, "push", stored.session, place, "--move")
    assert (moved["session_id"], moved["handed_over"]) == (stored.session, True)
    assert told(stored, "settle", stored.session)["status"] == "moved"
    assert refused(stored, "push", stored.session, place, "--move")[0] == "NotOwner"
    assert told(there, "pull", stored.session, place, "--take")["taken"]
    assert told(there, "settle", stored.session) | {"peer": ""} == {
        "session_id": stored.session,
        "status": "owned",
        "epoch": 2,
        "peer": "",
    }
    assert refused(tmp_path / "elsewhere", "pull", stored.session, place, "--take")[0] == "NotOwner"
    assert refused(tmp_path / "third", "pull", stored.session, str(there), "--take")[0] == "PlaceUnknown"
    assert not (tmp_path / "third").exists()
    assert told(stored, "settle", stored.session, "--take-back", "--yes")["status"] == "owned"
