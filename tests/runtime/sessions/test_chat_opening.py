"""The system prompt and the tool list of a chat are read once, whoever else begins with them, and whatever is asked."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from serai.runtime import Runtime, SamplingParams, open_runtime
from serai.runtime.errors import SessionBusy

pytestmark = pytest.mark.anyio

SYSTEM = "You keep the notes of a small harbour. Answer from the notes only, and say so when they are silent. " * 3
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look_up", "description": "Look into the notes.", "parameters": {}}}
]
FEW = SamplingParams(temperature=0, max_tokens=6)


async def ask(rt: Runtime, question: str, **options: Any) -> tuple[int, int, list[int], int]:
    """Tokens that had to be read and tokens that were known, all the ids in the end, and where the reply begins."""
    before = rt.counters.prefilled_tokens, rt.counters.reused_tokens
    chat = await rt.chat(system=SYSTEM, tools=TOOLS, thinking=False, **options)
    await chat.send(question, FEW).collect()
    ids, start = chat.session.tokens().tolist(), chat.session.timeline.turn.generation_start
    await chat.close()
    return rt.counters.prefilled_tokens - before[0], rt.counters.reused_tokens - before[1], ids, start


async def test_the_second_chat_reads_its_own_question_only(tmp_path: Path) -> None:
    store = tmp_path / "store"
    async with open_runtime("nano", budget="512MiB", store=store) as rt:
        first = await ask(rt, "Where is the red box?")
        second = await ask(rt, "Who is Mira?")
        other = await ask(rt, "Who is Mira?", namespace="other")
        await rt.settle()
    async with open_runtime("nano", budget="512MiB", store=store) as rt:
        third = await ask(rt, "And the blue key?")
    assert first[1] == other[1] == 0
    assert second[0] < 30 < 100 < second[1]
    assert third[1] == second[1], "after a restart too"
    assert other[2] == second[2], "what is read is the same, in one append or two"


async def test_a_fork_while_the_opening_is_read_has_it_once(tmp_path: Path) -> None:
    """Whenever it is taken: what it then says is what a chat that was never forked says."""
    async with open_runtime("nano", budget="512MiB", store=tmp_path / "store") as rt:
        _, _, expected, prompt = await ask(rt, "Who is Mira?", namespace="alone")
        for turns in range(0, 40, 3):
            chat = await rt.chat(system=SYSTEM, tools=TOOLS, thinking=False, namespace=f"n{turns}")
            forks = []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(chat.send("Who is Mira?", FEW).collect)
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                forks.append(await chat.fork())
            assert chat.session.tokens().tolist() == expected
            fork = forks[0]
            assert expected[: fork.session.position] == fork.session.tokens().tolist()
            if fork.session.position < prompt:
                await fork.send("Who is Mira?", FEW).collect()
                assert fork.session.tokens().tolist() == expected


async def test_a_reply_that_nobody_holds_any_more_keeps_nobody_waiting() -> None:
    """Broken off half way, or cancelled before it began: the chat goes on from what was handed out."""
    async with open_runtime("nano", budget="512MiB") as rt:
        chat = await rt.chat(system=SYSTEM, tools=TOOLS, thinking=False)
        events = 0
        async for _ in chat.send("Who is Mira?", FEW):
            events += 1
            if events == 2:
                break
        position = chat.session.position
        await anyio.lowlevel.checkpoint()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await chat.send("And Tom?", FEW).collect()
        never_read = chat.send("And Anna?", FEW)
        with pytest.raises(SessionBusy, match="busy with a reply"):
            chat.send("And Leo?", FEW)
        del never_read
        assert chat.session.position == position
        reply = await chat.send("And Eva?", FEW).collect()
        assert reply.message.text
        assert chat.session.turn == 1
