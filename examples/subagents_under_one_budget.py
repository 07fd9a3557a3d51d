"""A coordinator and twelve sub-agents, more than fit in memory at once: those that rest lie in the store meanwhile.

python examples/subagents_under_one_budget.py [MODEL]
"""

import asyncio
import sys
import tempfile
from collections import Counter

from serai.runtime import Chat, Runtime, SamplingParams, open_runtime

BRIEF = (
    "The code of the red box is 4172. The home of Mira is Oslo. The job of Tom is baker. "
    "The place of the blue key is the cellar. The pet of Anna is grey cat. "
)
TASKS = ("What is the code of the red box?", "What is the home of Mira?", "What is the job of Tom?")
AGENTS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=40)


async def budget_for(model: str, states: int) -> int:
    """The model's bytes and those of a few sub-agents."""
    async with open_runtime(model, budget="1GiB") as rt:
        before = rt.status().budget
        one = await rt.session()
        await one.append(BRIEF * 5)
        state_bytes = rt.status().budget.live_bytes
        return before.trunk_bytes + before.expert_bytes + before.scratch_bytes + states * state_bytes


async def sub_agent(coordinator: Chat, number: int, at_work: asyncio.Semaphore) -> str:
    """Everything the coordinator has read is there from the start: nothing is copied, nothing is read twice."""
    async with at_work, await coordinator.fork(label=f"agent {number}") as agent:
        reply = await agent.send(TASKS[number % len(TASKS)], GREEDY).collect()
        return reply.message.text


async def resting_agents(rt: Runtime, at_work: asyncio.Semaphore) -> None:
    """Agents with histories of their own, all alive at once."""

    async def live(number: int) -> None:
        async with at_work:
            agent = await rt.session(label=f"resting {number}")
            await agent.append(f"Agent {number}. " + BRIEF * 4)

    await asyncio.gather(*(live(number) for number in range(AGENTS)))


async def main(model: str) -> None:
    budget_bytes = await budget_for(model, states=6)
    with tempfile.TemporaryDirectory() as store:
        async with open_runtime(model, budget=budget_bytes, store=store) as rt:
            at_work = asyncio.Semaphore(2)
            coordinator = await rt.chat(thinking=False, label="coordinator")
            await coordinator.send(BRIEF, GREEDY).collect()
            await resting_agents(rt, at_work)
            answers = await asyncio.gather(*(sub_agent(coordinator, number, at_work) for number in range(AGENTS)))
            status = rt.status()
            for task, answer in zip(TASKS, answers, strict=False):
                print(f"{task:36} {answer}")
            tiers = Counter(session.tier for session in status.sessions)
            used, whole = status.budget.used_bytes / 2**20, status.budget.budget_bytes / 2**20
            print(f"{len(status.sessions)} sessions are alive: {tiers['hot']} in memory, {tiers['cold']} in the store")
            print(f"{used:.1f} of {whole:.1f} MiB are used; {status.work.demotions} times one was moved out")
            print(f"{len(answers)} sub-agents answered")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "nano"))
