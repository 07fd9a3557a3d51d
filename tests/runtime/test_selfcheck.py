"""The self-check finds nothing in a model that keeps the contract, and finds each way of breaking it."""

from pathlib import Path

import pytest

from serai.checkpoints.snapshot import LatentType
from serai.runtime.bench.tiny import write_tiny_model
from serai.runtime.checks.selfcheck import Promise, selfcheck
from serai.runtime.errors import OutOfBudget
from serai.runtime.models.open_model import Precision, find_model, load_model
from serai.runtime.state import session_bytes
from tests.runtime.fake_model import Flaw, loaded_fake
from tests.runtime.odd_models import odd_shapes


def broken(promises: list[Promise]) -> set[str]:
    return {promise.promise for promise in promises if not promise.kept}


@pytest.mark.parametrize("latents", LatentType)
def test_a_model_that_keeps_the_contract_passes_every_case(latents: LatentType, tmp_path: Path) -> None:
    promises = list(selfcheck(loaded_fake(latents=latents), store=tmp_path / "store"))
    assert broken(promises) == set()
    assert len(promises) == 10
    assert all(promise.cases > 0 for promise in promises)
    assert promises[0].to_json() == {"promise": promises[0].promise, "cases": 96, "held": 96}


@pytest.mark.parametrize(
    ("flaw", "words"),
    [
        (Flaw.NEIGHBOURS, "alone and among 7"),
        (Flaw.NEIGHBOURS, "3 forks equal"),
        (Flaw.THREADS, "1 thread and"),
        (Flaw.CALL_LENGTH, "any split of a prompt"),
        (Flaw.OLD_BUFFERS, "leave no trace"),
        (Flaw.SHARED_WRITES, "leave what they came from as it was"),
        (Flaw.MEMORY_OUTSIDE_THE_STATE, "paused to disk and resumed"),
        (Flaw.WIDE_STEPS, "read layer by layer"),
        (Flaw.ROW_IN_CALL, "prefill, cached decode and step-by-step"),
    ],
)
def test_each_way_of_breaking_it_is_found(flaw: Flaw, words: str, tmp_path: Path) -> None:
    found = broken(list(selfcheck(loaded_fake(flaw), store=tmp_path / "store")))
    assert any(words in promise for promise in found), found


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("name", odd_shapes())
def test_the_engine_keeps_every_promise_in_odd_shapes(name: str, precision: Precision, tmp_path: Path) -> None:
    """B02, B03, B14: any split, any company, any thread count, forks and pauses give the same bits."""
    write_tiny_model(tmp_path / "model", odd_shapes()[name], seed=1)
    found = find_model(tmp_path / "model")
    try:
        loaded = load_model(found, precision, max_rows=256, wide_rows=400 if found.config.moe else 0)
        assert broken(list(selfcheck(loaded, store=tmp_path / "store"))) == set()
    finally:
        found.files.close()


def test_states_stay_within_the_bytes_they_may_take(tmp_path: Path) -> None:
    loaded = loaded_fake()
    with pytest.raises(OutOfBudget):
        list(selfcheck(loaded, store=tmp_path / "store", limit_bytes=session_bytes(loaded.layout, 64)))


def test_the_seed_decides_the_tokens_and_nothing_else(tmp_path: Path) -> None:
    first = list(selfcheck(loaded_fake(), store=tmp_path / "a", seed=1))
    again = list(selfcheck(loaded_fake(), store=tmp_path / "b", seed=2))
    assert [one.cases for one in first] == [one.cases for one in again]
