"""An agent waits for its tool and gives its memory to another one meanwhile. When the tool answers, it is back.

python examples/wait_for_tool.py [MODEL]
"""

import asyncio
import sys
import tempfile

import numpy as np

from serai.runtime import Runtime, SamplingParams, open_runtime

NOTES = "The code of the red box is 4172. The home of Mira is Oslo. The job of Tom is baker. " * 60
GREEDY = SamplingParams(temperature=0, max_tokens=20)


async def budget_for(model: str) -> int:
    """The model's bytes, and room for one agent at work but not for a second one beside it."""
    async with open_runtime(model, budget="1GiB") as rt:
        before = rt.status().budget
        one = await rt.session()
        await one.append(NOTES)
        await one.generate(GREEDY).collect()
        status = rt.status().sessions[0]
        state_bytes = status.own_bytes + status.shared_bytes
        return before.trunk_bytes + before.expert_bytes + before.scratch_bytes + 2 * state_bytes


async def tool(rt: Runtime) -> str:
    """While it works, somebody else needs the memory."""
    other = await rt.session(label="the other one")
    await other.append("Something else. " + NOTES)
    await other.generate(GREEDY).collect()
    await other.close()
    return " The tool says: the box is open."


async def main(model: str) -> None:
    budget_bytes = await budget_for(model)
    with tempfile.TemporaryDirectory() as store:
        async with open_runtime(model, budget=budget_bytes, store=store) as rt:
            agent = await rt.session(label="the agent")
            await agent.append(NOTES)
            before = await agent.logits()
            print(f"the agent has read {agent.position} tokens and calls a tool; its state is {agent.tier.value}")
            async with agent.waiting_for_tool(expected_s=60):
                result = await tool(rt)
                print(f"while the tool works its state is {agent.tier.value}")
            print(f"the tool has answered; its state is {agent.tier.value}")
            print("every bit is the same:", np.array_equal(before, await agent.logits()))
            used = await agent.append(result)
            await agent.generate(GREEDY).collect()
            print(f"{used.prefilled} tokens of the tool's answer were read, and nothing else")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "nano"))
