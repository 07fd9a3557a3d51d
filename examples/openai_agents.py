"""The OpenAI Agents SDK against serai: only what is new is sent each turn, and a second run forks the first.

pip install openai-agents
python examples/openai_agents.py http://127.0.0.1:8080/v1
"""

import asyncio
import sys

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


async def main(base_url: str) -> None:
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        name = (await client.models.list()).data[0].id
        agent = Agent(
            name="reader",
            instructions="Answer briefly.",
            tools=[weather],
            model=OpenAIResponsesModel(model=name, openai_client=client),
        )
        first = await Runner.run(agent, "How is the weather in Paris?", auto_previous_response_id=True)
        print("first:", first.final_output)
        for question in ("And in Rome?", "And in Oslo?"):
            fork = Runner.run_streamed(
                agent, question, previous_response_id=first.last_response_id, auto_previous_response_id=True
            )
            async for _ in fork.stream_events():
                pass
            print(f"{question}", fork.final_output)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"))
