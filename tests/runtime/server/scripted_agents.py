"""The native model of the Agents SDK over the scripted model: run with `python -m` where the SDK is installed.

Prints what happened as one JSON object; `tests/examples/test_native_agents.py` says what should have.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
from agents import (
    Agent,
    AgentsException,
    ModelSettings,
    ModelTracing,
    Runner,
    UserError,
    function_tool,
    set_tracing_disabled,
)
from openai.types.shared import Reasoning
from pydantic import BaseModel

from serai.runtime.openai_agents import agents_model
from serai.runtime.runtime import Runtime
from serai.runtime.scheduler import Limits
from serai.runtime.services import Policy
from tests.runtime.server.replies import ANY, ReplyModel, reply_runtime
from tests.runtime.server.scripted_server import reply


class City(BaseModel):
    city: str
    inhabitants: int


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


def said(prompt: str) -> str:
    if prompt.rfind(">for ever<") > prompt.rfind(">how is"):
        return f"</think><response>{ANY * 5000}</response></message>!"
    return reply(prompt)


async def live(runtime: Runtime) -> int:
    """Sessions that are at work."""
    return sum(one.doing is not None for one in runtime.status().sessions)


async def talk(runtime: Runtime) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    async with agents_model(runtime) as model:
        agent = Agent(name="reader", instructions="Be brief.", tools=[weather], model=model)
        first = await Runner.run(agent, "how is Paris?", auto_previous_response_id=True)
        seen["first"] = first.final_output
        seen["calls"] = [item.raw_item.name for item in first.new_items if item.type == "tool_call_item"]
        one, two = first.raw_responses
        seen["turns"] = [
            [one.usage.input_tokens, one.usage.input_tokens_details.cached_tokens, one.usage.output_tokens],
            [two.usage.input_tokens, two.usage.input_tokens_details.cached_tokens, two.usage.output_tokens],
        ]
        forks = []
        for question in ("how is Rome?", "how is Oslo?"):
            fork = Runner.run_streamed(
                agent, question, previous_response_id=first.last_response_id, auto_previous_response_id=True
            )
            kinds, pieces = [], []
            async for event in fork.stream_events():
                if event.type == "raw_response_event":
                    kinds.append(event.data.type)
                    if event.data.type == "response.output_text.delta":
                        pieces.append(event.data.delta)
            forks.append([fork.final_output, "".join(pieces), len(pieces), kinds[0], kinds[-1]])
            seen["fork_usage"] = fork.context_wrapper.usage.input_tokens_details.cached_tokens
        seen["forks"] = forks
        seen["ways_on"] = len(model._service.sessions.catalogue.children(str(first.last_response_id)[5:]))
        no_thinking = ModelSettings(reasoning=Reasoning(effort="none"))
        describer = Agent(name="describer", output_type=City, model=model, model_settings=no_thinking)
        seen["object"] = (await Runner.run(describer, "describe it")).final_output.model_dump()
        streamed = Runner.run_streamed(describer, "describe it again")
        async for _ in streamed.stream_events():
            pass
        seen["streamed_object"] = streamed.final_output.model_dump()

        endless = model.stream_response(
            None, "for ever", ModelSettings(), [], None, [], ModelTracing.DISABLED, previous_response_id=None
        )
        async for event in endless:
            if event.type == "response.output_text.delta":
                break
        await endless.aclose()
        seen["after_leaving"] = [model._service.active, await live(runtime)]
        seen["errors"] = []
        for settings, previous in ((ModelSettings(temperature=-1), None), (ModelSettings(), "resp_" + "0" * 32)):
            try:
                await Runner.run(
                    Agent(name="wrong", model=model, model_settings=settings), "hi", previous_response_id=previous
                )
            except UserError as error:
                seen["errors"].append(str(error))
        runtime.wrap_engine(Broken)
        try:
            await Runner.run(Agent(name="late", model=model), "hi")
        except AgentsException as error:
            seen["errors"].append(str(error))
    return seen


class Broken:
    def __init__(self, engine: object) -> None:
        pass

    def step(self, plan: object) -> Any:
        raise RuntimeError("a kernel broke")


async def main() -> None:
    set_tracing_disabled(True)
    with TemporaryDirectory() as store:
        async with reply_runtime(
            ReplyModel(said), store=Path(store) / "s", limits=Limits(), policy=Policy()
        ) as runtime:
            print(json.dumps(await talk(runtime)))


if __name__ == "__main__":
    anyio.run(main)
