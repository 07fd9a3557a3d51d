"""Two nodes beside each other."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from serai.checkpoints import Store, new_id
from serai.checkpoints.upkeep.compare import compare
from tests.checkpoints.samples import grown, make_node, make_snapshot, saved


def test_branches_share_what_they_began_with(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "s")) as store:
        state = make_snapshot(40)
        root = saved(store, state)
        left = saved(store, grown(state, 5, seed=1), root)
        right = replace(make_node(3, root, session_id=new_id()), tokens=np.array([40, 99, 98], np.int32))
        store.record(right)
        found = compare(store, left.id, right.id)
        assert found.positions == (45, 43)
        assert (found.common_tokens, found.common_node) == (41, root.id)
        assert (found.shared_bytes, found.own_bytes[1]) == (0, 0)  # the right one has no snapshot
        assert compare(store, root.id, left.id).shared_bytes == 10 * 4096
        same = compare(store, left.id, left.id)
        assert same.own_bytes == (0, 0)
        assert same.common_tokens == 45


def test_strangers_may_begin_alike(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "s")) as store:
        one, other = make_node(4), make_node(6)
        store.record(one)
        store.record(other)
        found = compare(store, one.id, other.id)
        assert (found.common_tokens, found.common_node) == (4, None)
