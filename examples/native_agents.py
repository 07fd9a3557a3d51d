"""The OpenAI Agents SDK with serai in the same process: no server, and a response id is a place to go on from.

pip install 'serai[agents]'
python examples/native_agents.py
"""

import asyncio
from tempfile import TemporaryDirectory

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from openai.types.shared import Reasoning
from pydantic import BaseModel, Field

from serai.runtime import Runtime, open_runtime
from serai.runtime.openai_agents import agents_model

BRIEFLY = ModelSettings(max_tokens=200, tool_choice="required")
NO_THINKING = ModelSettings(max_tokens=200, reasoning=Reasoning(effort="none"))


class City(BaseModel):
    """A city and what is known of it."""

    city: str = Field(max_length=20)
    inhabitants: int = Field(ge=0, le=99_999_999)


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


async def talk(runtime: Runtime) -> None:
    async with agents_model(runtime) as model:
        agent = Agent(name="reader", tools=[weather], model=model, model_settings=BRIEFLY)
        first = await Runner.run(agent, "How is the weather in Paris?", auto_previous_response_id=True)
        print("first:", first.final_output)
        used = first.context_wrapper.usage
        cached = used.input_tokens_details.cached_tokens
        print(f"{used.requests} requests, {cached} of {used.input_tokens} tokens reused")
        for question in ("And in Rome?", "And in Oslo?"):  # both go on from the first answer: a fork
            fork = Runner.run_streamed(
                agent, question, previous_response_id=first.last_response_id, auto_previous_response_id=True
            )
            pieces = []
            async for event in fork.stream_events():
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                    pieces.append(event.data.delta)
            print(question, fork.final_output, f"(in {len(pieces)} pieces: {''.join(pieces) == fork.final_output})")
        describer = Agent(name="describer", output_type=City, model=model, model_settings=NO_THINKING)
        print("as an object:", (await Runner.run(describer, "Describe Paris.")).final_output)


async def main() -> None:
    set_tracing_disabled(True)
    with TemporaryDirectory() as store:
        async with open_runtime("nano", budget="1GiB", store=store) as runtime:
            await talk(runtime)


if __name__ == "__main__":
    asyncio.run(main())
