"""A server over a scripted model that says what the clients of `examples` expect: run it with `python -m`.

It calls the first declared tool unless a result is there, answers a wanted JSON schema with its smallest object, and
otherwise says how many user messages it has read.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import anyio

from serai.runtime.scheduler import Limits
from serai.runtime.server.options import ServerOptions
from serai.runtime.server.running import listen, run_server
from serai.runtime.services import Policy
from tests.runtime.server.replies import ReplyModel, reply_runtime

USER = 'message role="user"'
TEXTS = {"city": "Paris", "location": "Paris", "query": "serai"}


def reply(prompt: str) -> str:
    asked = prompt.rindex(USER) if USER in prompt else 0
    thought = "" if prompt.endswith("response<|sep|>") else "let me see</think><response>"
    schema = re.search(r"following schema:\n```json\n(.*?)\n```", prompt[asked:], re.DOTALL)
    tools = re.search(r"# Tools\n.*?```json\n(\[.*?\])\n```", prompt, re.DOTALL)
    answered = 'message role="tool"' in prompt[asked:]
    if tools is not None and not answered and "tool_choice=none" not in prompt[asked:]:
        function = json.loads(tools[1])[0]["function"]
        arguments = "".join(_argument(key, value) for key, value in smallest(function.get("parameters", {})).items())
        call = f'<call tool="{function["name"]}" index="1">{arguments}</call>'
        return f"{thought}</response><tools>{call}</tools></message>!"
    if schema is not None:
        return f"{thought}{json.dumps(smallest(json.loads(schema[1])))}</response></message>!"
    if answered:
        return f"{thought}The tool says it is sunny.</response></message>!"
    return f"{thought}I have read {prompt.count(USER)} messages.</response></message>!"


def _argument(key: str, value: Any) -> str:
    kind = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}[type(value)]
    return f'<argument key="{key}" type="{kind}">{value if isinstance(value, str) else json.dumps(value)}</argument>'


def smallest(schema: dict[str, Any], name: str = "") -> Any:
    """A small value that a schema allows."""
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "object" | None:
            return {key: smallest(inner, key) for key, inner in schema.get("properties", {}).items()}
        case "array":
            return [smallest(schema.get("items", {"type": "string"}), name)]
        case "integer" | "number":
            return 7
        case "boolean":
            return True
        case _:
            return TEXTS.get(name, "text")


async def main(store: Path, open_responses_names: bool) -> None:
    options = ServerOptions(port=0, shutdown_s=1.0, log_level="warning", open_responses_names=open_responses_names)
    with listen(options) as bound:
        address = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        model = ReplyModel(reply)
        async with reply_runtime(model, store=store, limits=Limits(), policy=Policy()) as runtime:
            await run_server(
                runtime,
                options,
                bound,
                ready=lambda _: print(f"serving scripted at {address}", file=sys.stderr, flush=True),
            )


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), "--open-responses-names" in sys.argv)
