"""LangGraph against serai: going on from an older checkpoint of a graph goes on from an older response.

pip install langgraph langchain-openai
python examples/langgraph_fork.py http://127.0.0.1:8080/v1
"""

import sys

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from openai import OpenAI


def main(base_url: str) -> None:
    with OpenAI(base_url=base_url, api_key="none") as client:
        name = client.models.list().data[0].id
    model = ChatOpenAI(
        model=name, base_url=base_url, api_key="none", use_responses_api=True, use_previous_response_id=True
    )

    def answer(state: MessagesState) -> MessagesState:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer")
    app = graph.compile(checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "1"}}

    def ask(config: dict, text: str) -> tuple[str, str]:
        said = app.invoke({"messages": [HumanMessage(text)]}, config)["messages"][-1]
        return said.text, said.response_metadata["id"]

    text, root = ask(thread, "Think of a number.")
    print("first:", text)
    older = app.get_state(thread).config
    ask(thread, "Is it even?")
    ask(thread, "Is it prime?")
    text, forked = ask(older, "Double it.")  # from the older checkpoint
    print("forked:", text)
    with OpenAI(base_url=base_url, api_key="none") as client:
        came_from = client.responses.retrieve(forked).previous_response_id
        print("the fork goes on from the first response:", came_from == root)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1")
