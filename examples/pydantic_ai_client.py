"""pydantic-ai against serai: a tool, a streamed answer, and an answer as an object.

pip install "pydantic-ai-slim[openai]"
python examples/pydantic_ai_client.py http://127.0.0.1:8080/v1
"""

import asyncio
import sys

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    """A city and what is known of it."""

    city: str
    inhabitants: int


async def main(base_url: str) -> None:
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        name = (await client.models.list()).data[0].id
        provider = OpenAIProvider(openai_client=client)

        helper = Agent(OpenAIChatModel(name, provider=provider))

        @helper.tool_plain
        def weather(city: str) -> str:
            """The weather of a city."""
            return f"It is sunny in {city}."

        async with helper.run_stream("How is the weather in Paris?") as streamed:
            print("with a tool:", await streamed.get_output())
        structured = Agent(OpenAIChatModel(name, provider=provider), output_type=City)
        print("as an object:", (await structured.run("Describe Paris.")).output)
        responses = Agent(OpenAIResponsesModel(name, provider=provider), output_type=City)
        print("by responses:", (await responses.run("Describe Paris.")).output)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"))
