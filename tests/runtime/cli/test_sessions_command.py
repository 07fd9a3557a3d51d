"""`serai sessions tree`: text, JSON and pictures of live and of stored sessions."""

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from serai.checkpoints.nodes import NodeKind, NodeRecord
from serai.checkpoints.store import Store
from serai.runtime.cli.main import app
from serai.runtime.cli.sessions import stored_nodes
from serai.runtime.monitor.picture import depths

runner = CliRunner()
SVG = "{http://www.w3.org/2000/svg}"


def record(store: Store, session: str, parent: NodeRecord | None, *, label: str, at: float) -> NodeRecord:
    tokens = np.array([1, 2], np.int32)
    node = NodeRecord(
        session_id=session * 26,
        kind=NodeKind.APPEND,
        position=2 if parent is None else parent.position + 2,
        tokens=tokens,
        parent_id=None if parent is None else parent.id,
        label=label,
        created_s=at,
    )
    store.record(node)
    return node


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """a → (b → c, d), with c forked from b after b was forked from a; and e alone."""
    with Store.open(str(tmp_path / "store")) as store:
        first = record(store, "a", None, label="reader", at=1.0)
        second = record(store, "a", first, label="reader", at=2.0)
        third = record(store, "b", second, label="[/b] <x>", at=3.0)
        record(store, "c", third, label="", at=5.0)
        record(store, "d", first, label="docs", at=4.0)
        record(store, "e", None, label="alone", at=6.0)
    return tmp_path / "store"


def test_stored_sessions_stand_under_those_they_continue_from(folder: Path) -> None:
    with Store.open(str(folder), create=False) as store:
        nodes = stored_nodes(store)
    assert [(node.id[0], depth) for node, depth in zip(nodes, depths(nodes), strict=True)] == [
        ("a", 0),
        ("b", 1),
        ("c", 2),
        ("d", 1),
        ("e", 0),
    ]


def test_a_store_is_drawn_and_told(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tree.svg"
    result = runner.invoke(app, ["sessions", "tree", "--store", str(folder), "--svg", str(file), "--json"])
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)["sessions"]
    assert [one["label"] for one in told] == ["reader", "[/b] <x>", "cccccccc", "docs", "alone"]
    drawn = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    assert len(drawn.findall(f"{SVG}circle")) == 5
    assert "[/b] <x>" in "".join(drawn.itertext())


def test_live_sessions_and_their_budget_are_drawn(tmp_path: Path) -> None:
    tree, budget = tmp_path / "tree.svg", tmp_path / "budget.svg"
    result = runner.invoke(app, ["sessions", "tree", "--demo", "--svg", str(tree), "--budget-svg", str(budget)])
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[1].startswith("  planner")
    for file in (tree, budget):
        assert ElementTree.fromstring(file.read_text(encoding="utf-8")).tag == f"{SVG}svg"


def test_what_cannot_be_drawn_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    store = ["sessions", "tree", "--store", str(folder)]
    both = runner.invoke(app, [*store, "--budget-svg", "x.svg"])
    assert (both.exit_code, both.stderr.count("\n")) == (1, 1)
    assert "a store has none" in both.stderr
    nowhere = runner.invoke(app, [*store, "--svg", str(tmp_path / "no" / "x.svg")])
    assert (nowhere.exit_code, nowhere.stderr.count("\n")) == (1, 1)
