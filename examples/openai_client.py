"""OpenAI's client against serai: both APIs with streams, tools and answers as objects; three ways on from one response.

serai serve nano &
python examples/openai_client.py http://127.0.0.1:8080/v1
"""

import json
import sys
from typing import Any

from openai import OpenAI
from pydantic import BaseModel

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "description": "The weather of a city.", "parameters": SCHEMA}
SUNNY = json.dumps({"sky": "sunny"})
NO_THINKING: Any = {"effort": "none"}


class City(BaseModel):
    """A city and what is known of it."""

    city: str
    inhabitants: int


def chat(client: OpenAI, model: str) -> None:
    """Chat completions: the client sends the whole conversation each time, and serai reads what is new in it."""
    print("streamed: ", end="")
    hello: Any = [{"role": "user", "content": "Say hello."}]
    with client.chat.completions.create(model=model, messages=hello, max_tokens=60, stream=True) as chunks:
        for chunk in chunks:
            print(chunk.choices[0].delta.content or "", end="")
    print()

    messages: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
    tools: Any = [{"type": "function", "function": WEATHER}]
    with client.chat.completions.stream(
        model=model, messages=messages, tools=tools, tool_choice="required", max_tokens=200
    ) as stream:
        kinds = [event.type for event in stream]
        said = stream.get_final_completion().choices[0].message
    calls: Any = said.tool_calls or []
    print("called:", [(call.function.name, call.function.arguments) for call in calls], end=" ")
    print("in pieces:", "tool_calls.function.arguments.delta" in kinds)
    messages.append(said.model_dump(exclude_none=True, exclude={"parsed": True}))
    messages += [{"role": "tool", "tool_call_id": call.id, "content": SUNNY} for call in calls]
    answer = client.chat.completions.create(model=model, messages=messages, tools=tools, max_tokens=60)
    used = answer.usage
    cached = used.prompt_tokens_details.cached_tokens if used and used.prompt_tokens_details else 0
    print("answered:", answer.choices[0].message.content, f"({cached} of {used and used.prompt_tokens} tokens reused)")

    question: Any = [{"role": "user", "content": "Describe Paris."}]
    parsed = client.chat.completions.parse(
        model=model, messages=question, response_format=City, max_tokens=200, reasoning_effort="none"
    )
    print("as an object:", parsed.choices[0].message.parsed)


def responses(client: OpenAI, model: str) -> None:
    """Responses: an id is a place to go on from, as often as one likes."""
    tools: Any = [{"type": "function", **WEATHER, "strict": True}]
    with client.responses.stream(
        model=model, input="How is the weather in Paris?", tools=tools, tool_choice="required", max_output_tokens=200
    ) as stream:
        kinds = [event.type for event in stream]
        called = stream.get_final_response()
    print("the response called in pieces:", "response.function_call_arguments.delta" in kinds)
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": SUNNY}
        for item in called.output
        if item.type == "function_call"
    ]
    with client.responses.stream(
        model=model, input=results, previous_response_id=called.id, tools=tools, max_output_tokens=200
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        whole = stream.get_final_response().output_text
    print("the response answered:", whole, f"in {len(pieces)} pieces that add up: {''.join(pieces) == whole}")
    parsed = client.responses.parse(
        model=model, input="Describe Paris.", text_format=City, max_output_tokens=200, reasoning=NO_THINKING
    )
    print("the response as an object:", parsed.output_parsed)

    root = client.responses.create(model=model, input="Think of a number.", max_output_tokens=60)
    for question in ("Is it even?", "Is it prime?", "Double it."):
        fork = client.responses.create(model=model, input=question, previous_response_id=root.id, max_output_tokens=60)
        print(f"{question} {fork.output_text}")


def main(base_url: str) -> None:
    with OpenAI(base_url=base_url, api_key="none") as client:
        model = client.models.list().data[0].id
        chat(client, model)
        responses(client, model)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1")
