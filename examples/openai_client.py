"""OpenAI's client against serai: a streamed chat, a tool, and three ways on from one response.

serai serve nano &
python examples/openai_client.py http://127.0.0.1:8080/v1
"""

import json
import sys
from typing import Any

from openai import OpenAI

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def main(base_url: str) -> None:
    with OpenAI(base_url=base_url, api_key="none") as client:
        model = client.models.list().data[0].id

        print("streamed: ", end="")
        hello: Any = [{"role": "user", "content": "Say hello."}]
        with client.chat.completions.create(model=model, messages=hello, max_tokens=60, stream=True) as chunks:
            for chunk in chunks:
                print(chunk.choices[0].delta.content or "", end="")
        print()

        messages: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
        named: Any = {"type": "function", "function": {"name": "weather"}}
        called = client.chat.completions.create(
            model=model, messages=messages, tools=[WEATHER], tool_choice=named, max_tokens=200
        )
        said = called.choices[0].message
        calls: Any = said.tool_calls or []
        print("called:", [(call.function.name, call.function.arguments) for call in calls])
        messages.append(said.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"sky": "sunny"})} for call in calls
        ]
        answer = client.chat.completions.create(model=model, messages=messages, tools=[WEATHER], max_tokens=60)
        used = answer.usage
        cached = used.prompt_tokens_details.cached_tokens if used and used.prompt_tokens_details else 0
        print(
            "answered:", answer.choices[0].message.content, f"({cached} of {used and used.prompt_tokens} tokens reused)"
        )

        root = client.responses.create(model=model, input="Think of a number.", max_output_tokens=60)
        for question in ("Is it even?", "Is it prime?", "Double it."):
            fork = client.responses.create(
                model=model, input=question, previous_response_id=root.id, max_output_tokens=60
            )
            print(f"{question} {fork.output_text}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1")
