"""Anthropic's client against serai: streams, thinking, tools and answers as objects; what was read is read once.

pip install anthropic
serai serve nano &
python examples/anthropic_client.py http://127.0.0.1:8080
"""

import json
import sys
from typing import Any

from anthropic import Anthropic

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "description": "The weather of a city.", "input_schema": SCHEMA}
CITY: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "inhabitants": {"type": "integer"}},
    "required": ["city", "inhabitants"],
    "additionalProperties": False,
}


def main(base_url: str) -> None:
    with Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none") as client:  # it adds the /v1 itself
        model = "serai"  # whatever the name, the answer is the served model's
        thinks: Any = {"type": "enabled", "budget_tokens": 1_024}  # taken, and not held to
        hello: Any = [{"role": "user", "content": "Say hello."}]
        with client.messages.stream(model=model, max_tokens=200, messages=hello, thinking=thinks) as stream:
            kinds = [event.type for event in stream]
            said = stream.get_final_message()
        print("streamed:", *(block.text for block in said.content if block.type == "text"))
        print("thought in pieces:", kinds.count("thinking") > 1)

        messages: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
        asked: Any = {"model": model, "max_tokens": 200, "tools": [WEATHER]}
        with client.messages.stream(messages=messages, tool_choice={"type": "any"}, **asked) as stream:
            kinds = [event.type for event in stream]
            called = stream.get_final_message()
        uses = [block for block in called.content if block.type == "tool_use"]
        print("called:", [(use.name, use.input) for use in uses], "in pieces:", "input_json" in kinds)
        messages.append({"role": "assistant", "content": [block.model_dump() for block in called.content]})
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": json.dumps({"sky": "sunny"})} for use in uses
        ]
        messages.append({"role": "user", "content": results})
        counted = client.messages.count_tokens(model=model, messages=messages, tools=[WEATHER]).input_tokens
        answer = client.messages.create(messages=messages, **asked)
        print("answered:", *(block.text for block in answer.content if block.type == "text"))
        used = answer.usage
        print("reused:", used.cache_read_input_tokens, "of", counted, "tokens, as they were counted before")

        form: Any = {"format": {"type": "json_schema", "schema": CITY}}
        question: Any = [{"role": "user", "content": "Describe Paris."}]
        held = client.messages.create(model=model, max_tokens=200, messages=question, output_config=form)
        print("as an object:", [json.loads(block.text) for block in held.content if block.type == "text"])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080")
