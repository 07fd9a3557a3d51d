"""litellm against serai: chat and responses through its OpenAI provider.

pip install litellm
python examples/litellm_client.py http://127.0.0.1:8080/v1
"""

import os
import sys

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices first

import litellm


def main(base_url: str) -> None:
    where = {"api_base": base_url, "api_key": "none"}
    name = "openai/serai"
    streamed = litellm.completion(
        model=name, messages=[{"role": "user", "content": "Say hello."}], stream=True, max_tokens=60, **where
    )
    print("streamed:", "".join(chunk.choices[0].delta.content or "" for chunk in streamed))
    first = litellm.responses(model=name, input="Think of a number.", max_output_tokens=60, **where)
    fork = litellm.responses(
        model=name, input="Double it.", previous_response_id=first.id, max_output_tokens=60, **where
    )
    print("forked:", fork.output_text)
    print("tokens reused:", fork.usage.input_tokens_details.cached_tokens)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1")
