"""Killing and failing a store at every single disk call, and looking at what is left.

`run` goes through every kind of work on a store (record, turn, save, erase, collect, import, set aside, rebuild), every
call it makes that changes the disk, and every fault at that call: the process killed before it, after it or half-way
through a write, the power cut after it, no space, an input/output error, a short write. Each case is a real process on
a copy of one small store; afterwards everything that was committed before must load bit for bit, everything
acknowledged must be there, `fsck` must be clean but for what was set aside, nothing unowned may be left, and the same
work must succeed.

As a module it prints one JSON object: `python -m serai.checkpoints.harness.faults [--every N]`. It forks, so it must be
a process of its own.
"""

import argparse
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from serai.checkpoints.errors import SeraiError, StoreInvalid
from serai.checkpoints.files.codec import Packing
from serai.checkpoints.files.disk import Disk
from serai.checkpoints.harness.faulty_disk import Fault, FaultyDisk
from serai.checkpoints.harness.samples import FINGERPRINT, same_bits, sample_node, sample_state
from serai.checkpoints.moving.receiving import import_bundle
from serai.checkpoints.moving.transfer import export
from serai.checkpoints.names import new_id
from serai.checkpoints.nodes import NodeKind, NodeRecord
from serai.checkpoints.snapshot import Snapshot
from serai.checkpoints.store import Store
from serai.checkpoints.upkeep.fsck import fsck, rebuild
from serai.checkpoints.upkeep.gc import GcPolicy, collect


@dataclass(frozen=True, slots=True)
class Scene:
    """The store every case starts from, and what is in it."""

    folder: Path
    root: NodeRecord
    child: NodeRecord
    other: NodeRecord
    bundle: bytes
    moved: NodeRecord
    states: dict[str, Snapshot]


def _state(position: int, seed: int) -> Snapshot:
    return sample_state(position, seed, smooth=True)


NEW_STATE = _state(70, 50)
NEW_NODE_ID = "n" * 26
SET_ASIDE = "its first step failed"


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of work: what it does, which states may be found of which nodes if it did not end, and after it did."""

    name: str
    act: Callable[[Store, Scene], object]
    may_change: Callable[[Scene], dict[str, tuple[Snapshot | None, ...]]]
    after: Callable[[Store, Scene], bool]


def _record(store: Store, scene: Scene) -> None:
    store.record(replace(sample_node(3, scene.child), id=NEW_NODE_ID))


def _turn(store: Store, scene: Scene) -> None:
    if all(node.id != NEW_NODE_ID for node in _nodes(store, scene)):
        _record(store, scene)
    later = _state(73, 51)
    later = replace(later, pages=scene.states[scene.child.id].pages[:10] + later.pages[10:])
    store.save(NEW_NODE_ID, later, FINGERPRINT, reason="turn")
    store.tag("latest", NEW_NODE_ID)


def _save(store: Store, scene: Scene) -> None:
    store.save(scene.child.id, NEW_STATE, FINGERPRINT, reason="turn", packing=Packing.SMALL)


def _erase(store: Store, scene: Scene) -> None:
    store.delete_session(scene.other.session_id)


def _collect(store: Store, scene: Scene) -> None:
    collect(store, GcPolicy(snapshots_per_session=1))


def _import(store: Store, scene: Scene) -> None:
    import_bundle(store, io.BytesIO(scene.bundle))


def _set_aside(store: Store, scene: Scene) -> None:
    store.set_aside(scene.other.id, SET_ASIDE)


def _is_kept(store: Store, node_id: str, state: Snapshot) -> bool:
    return store.has_snapshot(node_id) and same_bits(store.load(node_id), state)


WORKS: tuple[Work, ...] = (
    Work("record", _record, lambda scene: {}, lambda store, scene: store.tokens(NEW_NODE_ID).size == 73),
    Work(
        "turn",
        _turn,
        lambda scene: {},
        lambda store, scene: store.resolve("latest") == NEW_NODE_ID and store.has_snapshot(NEW_NODE_ID),
    ),
    Work(
        "save",
        _save,
        lambda scene: {scene.child.id: (scene.states[scene.child.id], NEW_STATE)},
        lambda store, scene: _is_kept(store, scene.child.id, NEW_STATE),
    ),
    Work(
        "erase",
        _erase,
        lambda scene: {scene.other.id: (scene.states[scene.other.id], None)},
        lambda store, scene: all(session.session_id != scene.other.session_id for session in store.sessions()),
    ),
    Work(
        "collect",
        _collect,
        lambda scene: {scene.root.id: (scene.states[scene.root.id], None)},
        lambda store, scene: not store.has_snapshot(scene.root.id),
    ),
    Work(
        "import",
        _import,
        lambda scene: {scene.moved.id: (scene.states[scene.moved.id], None)},
        lambda store, scene: _is_kept(store, scene.moved.id, scene.states[scene.moved.id]),
    ),
    Work(
        "set aside",
        _set_aside,
        lambda scene: {scene.other.id: (scene.states[scene.other.id], None)},
        lambda store, scene: not store.has_snapshot(scene.other.id),
    ),
)


def make_scene(folder: Path) -> Scene:
    """A store with a two-node session, another session that shares pages with it, and a bundle from elsewhere."""
    states: dict[str, Snapshot] = {}
    with Store.open(str(folder / "scene")) as store:
        first, second = _state(41, 1), _state(70, 2)
        second = replace(second, pages=first.pages[:10] + second.pages[10:])
        root = sample_node(41)
        child = sample_node(29, root)
        other = sample_node(41)
        for node, state in ((root, first), (child, second), (other, replace(first, kda=second.kda))):
            store.record(node)
            store.save(node.id, state, FINGERPRINT, reason="turn", packing=Packing.SMALL)
            states[node.id] = state
        store.tag("latest", child.id)
    sink = io.BytesIO()
    with Store.open(str(folder / "elsewhere")) as store:
        moved = replace(sample_node(50), session_id=new_id(), kind=NodeKind.MIGRATE)
        states[moved.id] = _state(50, 9)
        store.record(moved)
        store.save(moved.id, states[moved.id], FINGERPRINT, reason="move")
        export(store, moved.id, sink)
    return Scene(folder / "scene", root, child, other, sink.getvalue(), moved, states)


def cases(scene: Scene, folder: Path, only: str | None = None) -> Iterator[tuple[Work | None, int, Fault, str]]:
    """Every work (or the one named), call and fault; None is a rebuild of the index. The text names the call."""
    for work in (*WORKS, None):
        if only not in (None, _name(work)):
            continue
        disk = FaultyDisk()
        copy = _copy(scene.folder, folder / "count")
        _act(copy, work, scene, disk)
        for number, call in enumerate(disk.calls):
            for fault in Fault:
                if fault in (Fault.TORN, Fault.SHORT) and call != "write":
                    continue
                if fault is Fault.NO_SPACE and call not in ("make_folder", "create", "write"):
                    continue
                if fault is Fault.IO_ERROR and call == "passing":
                    continue
                yield work, number, fault, call


def _copy(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target


def _act(folder: Path, work: Work | None, scene: Scene, disk: Disk) -> None:
    if work is None:
        rebuild(str(folder), disk=disk)
        return
    with Store.open(str(folder), disk=disk, threads=1) as store:
        work.act(store, scene)


def run_case(folder: Path, scene: Scene, work: Work | None, at: int, fault: Fault) -> list[str]:
    """Do the work in a child process that meets the fault, then say what is wrong with the store it leaves."""
    copy = _copy(scene.folder, folder / "case")
    child = os.fork()
    if child == 0:
        status = 3
        try:
            _act(copy, work, scene, FaultyDisk(at, fault))
            status = 0
        except SeraiError:
            status = 1
        finally:
            os._exit(status)
    _, result = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(result)
    ended = None if killed else os.WEXITSTATUS(result)
    problems = [] if ended in (None, 0, 1) else [f"the process ended with status {ended}"]
    try:
        return problems + _aftermath(copy, scene, work, done=ended == 0)
    except (SeraiError, OSError, ValueError, AssertionError) as error:
        return [*problems, f"{type(error).__name__}: {error}"]


def _aftermath(folder: Path, scene: Scene, work: Work | None, *, done: bool) -> list[str]:
    problems = []
    try:
        store = Store.open(str(folder))
    except StoreInvalid:
        if work is not None:
            raise
        rebuild(str(folder))  # a rebuild that was killed is done again
        store = Store.open(str(folder))
    with store:
        allowed = {} if work is None else work.may_change(scene)
        for node_id, state in scene.states.items():
            if node_id == scene.moved.id and node_id not in allowed:
                continue
            problems += _found(store, node_id, allowed.get(node_id, (state,)))
        if store.resolve("latest") not in (scene.child.id, NEW_NODE_ID):
            problems.append("a tag points elsewhere")
        if done and work is not None and not work.after(store, scene):
            problems.append("what was acknowledged is not there")
        report = fsck(store)
        problems += [one for one in report.problems if SET_ASIDE not in one]
        if done and report.orphans:
            problems.append(f"{len(report.orphans)} files are left of work that was acknowledged")
        if fsck(store).orphans:
            problems.append("unowned files are left after fsck")
        if store.sizes().file_bytes != _bytes_of(folder):
            problems.append("the store's size is not that of its files")
        if work is not None:
            if work.name != "record" or not any(node.id == NEW_NODE_ID for node in _nodes(store, scene)):
                _again(store, work, scene)
            if not work.after(store, scene):
                problems.append("the work cannot be done afterwards")
    return problems


def _nodes(store: Store, scene: Scene) -> list[NodeRecord]:
    return [store.node(node_id) for node_id in store.children(scene.child.id)]


def _again(store: Store, work: Work, scene: Scene) -> None:
    if work.name == "erase" and work.after(store, scene):
        return
    work.act(store, scene)


def _found(store: Store, node_id: str, allowed: tuple[Snapshot | None, ...]) -> list[str]:
    try:
        has = store.has_snapshot(node_id)
    except SeraiError:
        has = False
    if not has:
        return [] if None in allowed else [f"the snapshot of node {node_id} is lost"]
    state = store.load(node_id, FINGERPRINT)
    if any(expected is not None and same_bits(state, expected) for expected in allowed):
        return []
    return [f"the snapshot of node {node_id} is another"]


def _bytes_of(folder: Path) -> int:
    kinds = ("nodes", "manifests", "parts", "tags", "tmp")
    files = (file for kind in kinds for file in (folder / kind).rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file())


@dataclass(frozen=True, slots=True)
class FaultsReport:
    """`injected` cases, of which `lost` went wrong; each problem says where."""

    injected: int
    lost: int
    problems: tuple[str, ...]


def _name(work: Work | None) -> str:
    return "rebuild" if work is None else work.name


def run(folder: Path, *, every: int = 1, only: str | None = None) -> FaultsReport:
    """Run every `every`-th case in `folder`, of all work or of one kind, in a process without other threads."""
    scene = make_scene(folder)
    injected, problems = 0, []
    for number, (work, at, fault, call) in enumerate(cases(scene, folder, only)):
        if number % every:
            continue
        injected += 1
        found = run_case(folder, scene, work, at, fault)
        if found:
            problems.append(f"{_name(work)}, {fault.value} call {at} ({call}): {'; '.join(found)}")
    return FaultsReport(injected, len(problems), tuple(problems))


def main(arguments: list[str]) -> int:
    """The command line; 0 if nothing was lost."""
    parser = argparse.ArgumentParser(prog="python -m serai.checkpoints.harness.faults", description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="run only every N-th case")
    parser.add_argument("--only", choices=[_name(work) for work in (*WORKS, None)], help="run only this kind of work")
    parser.add_argument("--dir", type=Path, default=None, help="where to work; a temporary folder unless given")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="serai-faults-", dir=options.dir) as folder:
        report = run(Path(folder), every=options.every, only=options.only)
    print(json.dumps({"faults_injected": report.injected, "faults_lost": report.lost, "problems": report.problems}))
    return int(report.lost > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
