"""OpenAI's own client against a server that was really started, over a tiny model."""

import signal
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, OpenAI

from serai.runtime.bench.tiny import write_tiny_model
from tests.runtime.server.started import started


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder)
    return folder


def continued(client: OpenAI, id_: str, text: str) -> list[Any]:
    """A continuation, to the bit: each token as text and bytes, its logprob and the likeliest others with theirs."""
    made = client.responses.create(
        model="tiny",
        input=text,
        previous_response_id=id_,
        max_output_tokens=12,
        temperature=0.9,
        include=["message.output_text.logprobs"],
        top_logprobs=3,
        extra_body={"seed": 5},
    )
    parts = [part for item in made.output if item.type == "message" for part in item.content]
    told = [part.model_dump() for part in parts]
    assert sum(len(part["logprobs"]) for part in told) >= 5
    return [*told, made.output_text, made.usage.model_dump()["output_tokens"] if made.usage else None]


def asked_first(client: OpenAI) -> str:
    made = client.responses.create(
        model="tiny", input="Hello.", max_output_tokens=8, reasoning={"effort": "none"}, extra_body={"seed": 1}
    )
    return made.id


def test_three_ways_on_from_one_response_with_the_server_killed_between(tiny: Path, tmp_path: Path) -> None:
    """Fork, restart and resume through the client alone: what comes is, to the bit, what an undisturbed server says."""
    questions = ("First?", "Second?", "Third?")
    with (
        started(tiny, "--store", tmp_path / "undisturbed", cwd=tmp_path) as (url, process),
        OpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        id_ = asked_first(client)
        expected = [continued(client, id_, question) for question in questions]
        assert expected[0] == continued(client, id_, questions[0])
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0, "a signal ends it in order"
    said: list[list[Any]] = []
    ids: list[str] = []
    for question in questions:
        with (
            started(tiny, "--store", tmp_path / "killed", cwd=tmp_path) as (url, process),
            OpenAI(base_url=url, api_key="none", max_retries=0) as client,
        ):
            ids = ids or [asked_first(client)]
            said.append(continued(client, ids[0], question))
            # It is killed in the middle of another reply.
            stream = client.responses.create(
                model="tiny", input="More?", previous_response_id=ids[0], max_output_tokens=5_000, stream=True
            )
            next(iter(stream))
            process.kill()
            process.wait()
    assert said == expected
    assert len({str(one) for one in said}) == len(questions), "the three differ"


def test_everyday_calls(tiny: Path, tmp_path: Path) -> None:
    with (
        started(tiny, "--store", tmp_path / "store", "--api-key", "secret", cwd=tmp_path) as (url, _),
        OpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger,
        OpenAI(base_url=url, api_key="secret", max_retries=0) as client,
    ):
        with pytest.raises(APIStatusError) as refused:
            stranger.models.list()
        assert refused.value.status_code == 401
        model = client.models.list().data[0].id
        assert client.models.retrieve(model).id == model
        chunks = list(
            client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "Hi."}],
                max_tokens=6,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 6
        with client.responses.stream(model=model, input="Hi.", max_output_tokens=6) as stream:
            *events, last = list(stream)
        assert events[0].type == "response.created"
        assert last.type == "response.incomplete"
        final = last.response
        assert client.responses.retrieve(final.id).usage == final.usage
        background = client.responses.create(model=model, input="Hi.", background=True, max_output_tokens=6)
        assert background.status == "queued"
        followed = list(client.responses.retrieve(background.id, stream=True))
        assert followed[-1].type == "response.incomplete"
        assert client.responses.input_items.list(background.id).data
        client.responses.delete(background.id)
        assert client.completions.create(model=model, prompt="Once", max_tokens=4).usage is not None
        with pytest.raises(APIStatusError) as missing:
            client.responses.retrieve(background.id)
        assert missing.value.status_code == 404
