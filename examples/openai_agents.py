"""The OpenAI Agents SDK against serai: only what is new is sent each turn, and a second run forks the first.

pip install openai-agents
python examples/openai_agents.py http://127.0.0.1:8080/v1
"""

import asyncio
import sys

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel


class City(BaseModel):
    """A city and what is known of it."""

    city: str
    inhabitants: int


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


async def main(base_url: str) -> None:
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        model = OpenAIResponsesModel(model=(await client.models.list()).data[0].id, openai_client=client)
        limits = ModelSettings(max_tokens=200)
        agent = Agent(
            name="reader", instructions="Answer briefly.", tools=[weather], model=model, model_settings=limits
        )
        first = await Runner.run(agent, "How is the weather in Paris?", auto_previous_response_id=True)
        print("first:", first.final_output)
        sent = [len(one.output) for one in first.raw_responses]
        print(f"in {len(sent)} responses, the later ones from the one before")
        for question in ("And in Rome?", "And in Oslo?"):
            fork = Runner.run_streamed(
                agent, question, previous_response_id=first.last_response_id, auto_previous_response_id=True
            )
            pieces = []
            async for event in fork.stream_events():
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                    pieces.append(event.data.delta)
            print(question, fork.final_output, f"(streamed: {''.join(pieces) == fork.final_output})")
        used = fork.context_wrapper.usage
        print(f"{used.input_tokens_details.cached_tokens} of {used.input_tokens} tokens reused")

        settings = ModelSettings(max_tokens=200, reasoning=Reasoning(effort="none"))
        describer = Agent(name="describer", output_type=City, model=model, model_settings=settings)
        print("as an object:", (await Runner.run(describer, "Describe Paris.")).final_output)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"))
