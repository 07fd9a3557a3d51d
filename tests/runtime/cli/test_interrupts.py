"""Signals: the first stops the work, the second the process, and handlers are given back."""

import signal

import anyio
import anyio.lowlevel
import pytest

from serai.runtime.cli import interrupts
from serai.runtime.cli.interrupts import interruptible, leaving_at_once


class Left(BaseException):
    """Instead of the end of the process."""


@pytest.mark.parametrize("number", interrupts.SIGNALS)
def test_the_first_signal_cancels_the_work_and_the_second_leaves(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(interrupts, "leave_at_once", left.append)

    async def work() -> int | None:
        async with interruptible() as interrupt:
            with interrupt.stops:
                signal.raise_signal(number)
                await anyio.sleep_forever()
            assert left == []
            signal.raise_signal(number)
            while not left:
                await anyio.lowlevel.checkpoint()
            return interrupt.signal

    assert anyio.run(work) == number
    assert left == [number]


def test_work_that_ends_by_itself_was_not_interrupted() -> None:
    async def work() -> int | None:
        async with interruptible() as interrupt:
            with interrupt.stops:
                await anyio.lowlevel.checkpoint()
            return interrupt.signal

    assert anyio.run(work) is None


def test_handlers_are_as_before_afterwards(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def leave(number: int) -> None:
        raise Left(number)

    monkeypatch.setattr(interrupts, "leave_at_once", leave)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Left), leaving_at_once("nothing to resume"):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert "nothing to resume" in capsys.readouterr().err
