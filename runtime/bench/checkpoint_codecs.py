"""What each way of packing a state gives: its size, its speed, and what it does to the tokens that follow.

Size and effect are those of the nano model's real states; size and speed also those of a state of Kimi K3's shape,
since a small state's time is that of its fsyncs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.files.codec import Packing
from serai.checkpoints.files.manifest import LOSSLESS, Storage, StoredAs
from serai.checkpoints.harness.samples import FINGERPRINT
from serai.checkpoints.names import new_id
from serai.checkpoints.nodes import NodeKind, NodeRecord
from serai.checkpoints.snapshot import Snapshot
from serai.checkpoints.store import Store
from serai.runtime.bench.checkpoint_states import QUICK_SCALE, filled, shape_at
from serai.runtime.bench.recall import Student
from serai.runtime.bench.recall_cases import cases
from serai.runtime.bench.report import BenchFailed
from serai.runtime.chat import chat_format_for
from serai.runtime.checks.stepping import Stepper
from serai.runtime.models.open_model import Precision, find_model, load_model
from serai.runtime.state import State, StatePool, fill, snapshot_of

READ_TOKENS = 4096
QUICK_READ_TOKENS = 512
FOLLOWING_TOKENS = 64
ASKED_TOKENS = 1024
ASKED, QUICK_ASKED = 20, 3
"""Questions, asked of states that were kept between the notebook and the question."""
CHILD_TOKENS = 1
"""A delta is tried against the state this many tokens before: the case in which it pays most."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to keep a state; `delta` packs it beside its parent's."""

    name: str
    storage: Storage
    packing: Packing
    delta: bool = False


NO_EFFECT = {"max_abs_logit": None, "mean_kl": None, "recall": None, "recall_cases": 0}
"""Of a state that no model goes on from."""
BFLOAT16 = Storage(StoredAs.BFLOAT16, StoredAs.BFLOAT16)
INT8 = Storage(StoredAs.INT8_ROWS, StoredAs.INT8_ROWS)
WAYS = (
    Way("raw", LOSSLESS, Packing.NONE),
    Way("lossless, packed where it pays (default)", LOSSLESS, Packing.AUTO),
    Way("lossless, byte planes + zstd", LOSSLESS, Packing.SMALL),
    Way("lossless, delta to the parent", LOSSLESS, Packing.SMALL, delta=True),
    Way("bf16", BFLOAT16, Packing.AUTO),
    Way("bf16, byte planes + zstd", BFLOAT16, Packing.SMALL),
    Way("int8 with row scales", INT8, Packing.AUTO),
    Way("int8 with row scales, zstd", INT8, Packing.SMALL),
)


def codec_rows(scratch: Path, quick: bool) -> list[dict[str, object]]:
    """A row for each way and each kind of state. Folders are made below `scratch`."""
    return [*_nano_rows(scratch / "nano", quick), *_k3_rows(scratch / "k3")]


def _nano_rows(folder: Path, quick: bool) -> Iterator[dict[str, object]]:
    found = find_model("nano")
    try:
        if found.tokenizer is None:
            raise BenchFailed("the nano model has no tokenizer, so it can't read a notebook")
        chat = chat_format_for(found.config.family.value, found.tokenizer)
        loaded = load_model(found, Precision.EXACT, max_rows=256)
        prompt = cases("recall", QUICK_READ_TOKENS if quick else READ_TOKENS, 1, chat)[0].prompt
        stepper = Stepper(loaded, StatePool(loaded.layout))
        asked = cases("recall", ASKED_TOKENS, QUICK_ASKED if quick else ASKED, chat)
        told = [_before_and_at(stepper, case.prompt[: case.memory_tokens]) for case in asked]
        student = Student(stepper, chat)
        following = prompt[-FOLLOWING_TOKENS:]
        read = _before_and_at(stepper, prompt[:-FOLLOWING_TOKENS])
        wanted = _logits(stepper, read[1].retain(), following)
        for number, way in enumerate(WAYS):
            row, restored = _kept(folder / str(number), way, *(snapshot_of(loaded.layout, state) for state in read))
            effect = effect_on_logits(wanted, _logits(stepper, _state(stepper, restored), following))
            right = []
            for index, (case, states) in enumerate(zip(asked, told, strict=True)):
                snapshots = (snapshot_of(loaded.layout, state) for state in states)
                _, kept = _kept(folder / f"{number}-{index}", way, *snapshots)
                right.append(student.answers_after(_state(stepper, kept), case, case.memory_tokens)[0])
            recall = {"recall": fmean(right), "recall_cases": len(right)}
            yield {"state": f"nano, exact, {read[1].position:,} tokens", **row, **effect, **recall}
        for state in chain(read, *told):
            state.release()
        loaded.model.close()
    finally:
        found.files.close()


def _before_and_at(stepper: Stepper, tokens: NDArray[np.int32]) -> tuple[State, State]:
    """The states `CHILD_TOKENS` before the end of `tokens` and there; they are the caller's."""
    before = stepper.run(tokens[:-CHILD_TOKENS])
    return before, stepper.run(tokens[-CHILD_TOKENS:], after=before.retain())


def _k3_rows(folder: Path) -> Iterator[dict[str, object]]:
    shape = shape_at(QUICK_SCALE)
    rng = np.random.default_rng(1)
    snapshot = filled(shape, rng)
    for number, way in enumerate(WAYS):
        if not way.delta:  # two states of the recurrence's own making would be needed; nano has real ones
            row, _ = _kept(folder / str(number), way, snapshot, snapshot)
            yield {"state": str(shape), **row, **NO_EFFECT}


def _kept(folder: Path, way: Way, before: Snapshot, snapshot: Snapshot) -> tuple[dict[str, object], Snapshot]:
    """Save and load in a new store; sizes and speeds, and what was loaded."""
    folder.mkdir(parents=True)
    fingerprint = replace(FINGERPRINT, state_layout=snapshot.layout.describe())
    with Store.open(str(folder / "store")) as store:
        node = _node(before.position if way.delta else snapshot.position, None)
        store.record(node)
        if way.delta:
            store.save(node.id, before, fingerprint, reason="bench", storage=way.storage, packing=way.packing)
            node = _node(snapshot.position, node)
            store.record(node)
        saved = store.save(node.id, snapshot, fingerprint, reason="bench", storage=way.storage, packing=way.packing)
        began_s = perf_counter()
        loaded = store.load(node.id, fingerprint)
        load_s = perf_counter() - began_s
    # Of a child, parts it shares with its parent are not its own: the ratio is that of what was new.
    live = snapshot.size_bytes * saved.new_raw_bytes / saved.raw_bytes if way.delta else snapshot.size_bytes
    row = {
        "codec": way.name,
        "lossy": way.storage.lossy,
        "ratio": saved.written_bytes / live,
        "save_mb_s": live / saved.elapsed_s / 1e6,
        "load_mb_s": snapshot.size_bytes / load_s / 1e6,
    }
    return row, loaded


def effect_on_logits(wanted: NDArray[np.float32], got: NDArray[np.float32]) -> dict[str, float]:
    """Largest difference of two runs' logits `[tokens, vocab]`, and mean KL(wanted‖got) in nats a token."""
    ours, theirs = (_log_softmax(rows.astype(np.float64)) for rows in (wanted, got))
    kl = (np.exp(ours) * (ours - theirs)).sum(axis=1)
    return {"max_abs_logit": float(np.abs(wanted - got).max()), "mean_kl": float(np.maximum(kl, 0.0).mean())}


def _log_softmax(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = rows - rows.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def _logits(stepper: Stepper, state: State, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """The logits after each of `tokens`, `[tokens, vocab]`. Takes over the caller's reference to `state`."""
    rows = []
    for start, end in pairwise(range(len(tokens) + 1)):
        state = stepper.run(tokens[start:end], after=state)
        if state.logits is None:
            raise AssertionError("a state after tokens has logits")
        rows.append(state.logits.array.copy())
    state.release()
    return np.stack(rows)


def _state(stepper: Stepper, snapshot: Snapshot) -> State:
    draft = stepper.pool.draft(stepper.pool.empty(), snapshot.position, with_logits=True)
    fill(draft, stepper.pool.layout, snapshot)
    return draft.commit()


def _node(position: int, parent: NodeRecord | None) -> NodeRecord:
    start = 0 if parent is None else parent.position
    return NodeRecord(
        session_id=new_id() if parent is None else parent.session_id,
        kind=NodeKind.APPEND,
        position=position,
        tokens=np.arange(start, position, dtype=np.int32),
        parent_id=None if parent is None else parent.id,
        turn=0 if parent is None else 1,
    )
