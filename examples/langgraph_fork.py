"""LangGraph against serai: going on from an older checkpoint of a graph goes on from an older response.

pip install langgraph langchain-openai
python examples/langgraph_fork.py http://127.0.0.1:8080/v1
"""

import sys

from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from openai import OpenAI
from pydantic import BaseModel


class City(BaseModel):
    """A city and what is known of it."""

    city: str
    inhabitants: int


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


def main(base_url: str) -> None:
    with OpenAI(base_url=base_url, api_key="none") as client:
        name = client.models.list().data[0].id
    # The id of a response lies in its message, and so in the graph's checkpoints: an older one names an older response.
    model = ChatOpenAI(
        model=name,
        base_url=base_url,
        api_key="none",
        use_responses_api=True,
        use_previous_response_id=True,
        max_tokens=200,
    )
    speaker = model.bind_tools([weather])

    def answer(state: MessagesState) -> MessagesState:
        return {"messages": [speaker.invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("answer", answer).add_node("tools", ToolNode([weather]))
    graph = graph.add_edge(START, "answer").add_conditional_edges("answer", tools_condition).add_edge("tools", "answer")
    app = graph.compile(checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "1"}}

    def ask(config: dict, text: str) -> tuple[str, str]:
        said = app.invoke({"messages": [HumanMessage(text)]}, config)["messages"][-1]
        return said.text, said.response_metadata["id"]

    text, root = ask(thread, "How is the weather in Paris?")
    print("first:", text)
    older = app.get_state(thread).config
    ask(thread, "And in Rome?")
    ask(thread, "And in Oslo?")
    text, _ = ask(older, "And in Bern?")  # from the older checkpoint
    print("forked:", text)
    with OpenAI(base_url=base_url, api_key="none") as client:
        state = app.get_state(thread).values["messages"]
        asked = next(place for place, message in enumerate(state) if message.text == "And in Bern?")
        came_from = client.responses.retrieve(state[asked + 1].response_metadata["id"]).previous_response_id
        print("the fork goes on from the first response:", came_from == root)
        print("which has", len(client.responses.retrieve(root).model_extra["next_response_ids"]), "ways on")

    pieces = [
        chunk.text
        for chunk, _ in app.stream({"messages": [HumanMessage("And in Lima?")]}, thread, stream_mode="messages")
        if isinstance(chunk, AIMessageChunk)
    ]
    print("streamed:", "".join(pieces), f"in several pieces: {len([piece for piece in pieces if piece]) > 1}")
    print("as an object:", model.with_structured_output(City, method="json_schema").invoke("Describe Paris."))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1")
