"""litellm against serai: chat and responses through its OpenAI provider.

pip install litellm
python examples/litellm_client.py http://127.0.0.1:8080/v1
"""

import os
import sys

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices first

import litellm
from pydantic import BaseModel

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather of a city.", "parameters": SCHEMA}


class City(BaseModel):
    """A city and what is known of it."""

    city: str
    inhabitants: int


def chat(name: str, where: dict) -> None:
    streamed = litellm.completion(
        model=name, messages=[{"role": "user", "content": "Say hello."}], stream=True, max_tokens=60, **where
    )
    print("streamed:", "".join(chunk.choices[0].delta.content or "" for chunk in streamed))

    messages = [{"role": "user", "content": "How is the weather in Paris?"}]
    asked = {"model": name, "tools": [{"type": "function", "function": WEATHER}], "max_tokens": 200, **where}
    chunks = list(litellm.completion(messages=messages, tool_choice="required", stream=True, **asked))
    said = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
    print("called, streamed:", [(call.function.name, call.function.arguments) for call in said.tool_calls])
    messages.append(said.model_dump(exclude_none=True))
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in said.tool_calls]
    print("answered:", litellm.completion(messages=messages, **asked).choices[0].message.content)

    question = [{"role": "user", "content": "Describe Paris."}]
    held = litellm.completion(model=name, messages=question, response_format=City, max_tokens=200, **where)
    print("as an object:", City.model_validate_json(held.choices[0].message.content))


def responses(name: str, where: dict) -> None:
    first = litellm.responses(model=name, input="Think of a number.", max_output_tokens=60, **where)
    fork = litellm.responses(
        model=name, input="Double it.", previous_response_id=first.id, max_output_tokens=60, **where
    )
    print("forked:", fork.output_text)
    print("tokens reused:", fork.usage.input_tokens_details.cached_tokens)
    events = litellm.responses(
        model=name,
        input="How is the weather in Paris?",
        tools=[{"type": "function", **WEATHER, "strict": True}],
        tool_choice="required",
        stream=True,
        max_output_tokens=200,
        **where,
    )
    last = list(events)[-1].response
    print("the response called, streamed:", [item.name for item in last.output if item.type == "function_call"])
    held = litellm.responses(model=name, input="Describe Paris.", text_format=City, max_output_tokens=200, **where)
    print("the response as an object:", City.model_validate_json(held.output_text))


def main(base_url: str) -> None:
    where = {"api_base": base_url, "api_key": "none"}
    chat("openai/serai", where)
    responses("openai/serai", where)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1")
