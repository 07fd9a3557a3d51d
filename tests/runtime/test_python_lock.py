"""While a runtime is open no thread keeps Python's lock for as long as Python lets it; afterwards all is as before."""

import sys
from pathlib import Path

import pytest

from serai.runtime.bench.tiny import cached_tiny_model
from serai.runtime.opening import open_runtime
from serai.runtime.python_lock import SWITCH_S, shared_fairly


def test_the_setting_is_the_first_ones_to_change_and_the_last_ones_to_put_back() -> None:
    usual_s = sys.getswitchinterval()
    first, second = shared_fairly(), shared_fairly()
    with first:
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S, rel=0.05)
        second.__enter__()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S, rel=0.05), "the other is still open"
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(usual_s, rel=0.05)


def test_a_setting_that_is_shorter_already_is_left() -> None:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)
    try:
        with shared_fairly():
            assert sys.getswitchinterval() == pytest.approx(0.0001, rel=0.05)
        assert sys.getswitchinterval() == pytest.approx(0.0001, rel=0.05)
    finally:
        sys.setswitchinterval(usual_s)


@pytest.mark.anyio
async def test_an_open_runtime_shares_it_fairly(tmp_path: Path) -> None:
    usual_s = sys.getswitchinterval()
    async with open_runtime(cached_tiny_model(tmp_path)):
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S, rel=0.05)
    assert sys.getswitchinterval() == pytest.approx(usual_s, rel=0.05)
