"""pydantic-ai against serai: a tool, a streamed answer, and answers as objects, by both of OpenAI's APIs.

pip install "pydantic-ai-slim[openai]"
python examples/pydantic_ai_client.py http://127.0.0.1:8080/v1
"""

import asyncio
import sys

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    """A city and what is known of it."""

    city: str
    inhabitants: int


def weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


async def main(base_url: str) -> None:
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        name = (await client.models.list()).data[0].id
        provider = OpenAIProvider(openai_client=client)
        for kind in (OpenAIChatModel, OpenAIResponsesModel):
            model = kind(name, provider=provider, settings={"max_tokens": 300})
            by = "chat" if kind is OpenAIChatModel else "responses"

            helper = Agent(model, tools=[weather])
            async with helper.run_stream("How is the weather in Paris?") as streamed:
                pieces = [piece async for piece in streamed.stream_text(delta=True, debounce_by=None)]
            print(f"with a tool, by {by}:", "".join(pieces), f"in several pieces: {len(pieces) > 1}")

            called = Agent(model, output_type=City)  # the answer is the arguments of a call that must come
            print(f"as an object, by {by}:", (await called.run("Describe Paris.")).output)
            held = Agent(model, output_type=NativeOutput(City))  # the answer is text held to a schema
            async with held.run_stream("Describe Paris.") as streamed:
                print(f"as streamed JSON, by {by}:", await streamed.get_output())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"))
