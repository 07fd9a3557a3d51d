"""A response as it grows: its items, and the events that tell a client of each change.

The order is OpenAI's: created, in_progress, then one item after the other, each opened when it has its first text and
closed before the next, then one terminal event that carries the whole response.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from serai.checkpoints.names import new_id
from serai.runtime.chat import ContentDelta, ReasoningDelta, ToolArgumentsDelta, ToolCallBegin, ToolCallEnd
from serai.runtime.chat import Event as ChatEvent
from serai.runtime.server.asking import Usage
from serai.runtime.server.responses_request import PREFIX, ResponsesRequest

Told: TypeAlias = dict[str, Any]
"""One event: `type`, `sequence_number`, and what the type has."""

ECHOED: Mapping[str, Any] = {
    "tool_choice": "auto",
    "truncation": "disabled",
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_logprobs": 0,
    "temperature": 1.0,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "store": True,
    "background": False,
    "service_tier": "default",
    "metadata": {},
    "safety_identifier": None,
    "prompt_cache_key": None,
    "instructions": None,
    "user": None,
}
"""Fields a response repeats of its request, and what they are when the request doesn't say."""


class ResponseDocument:
    """One response. `take` and `finish` give the events to tell; `document` is the response as it stands."""

    def __init__(
        self,
        request: ResponsesRequest,
        *,
        place_id: str,
        model: str,
        created_at: int,
        open_responses_names: bool = False,
    ) -> None:
        self.id = PREFIX + place_id
        self.status = "in_progress"
        self._request = request
        self._model = model
        self._created_at = created_at
        self._completed_at: int | None = None
        self._error: Mapping[str, str] | None = None
        self._incomplete: Mapping[str, str] | None = None
        self._usage: Usage | None = None
        self._output: list[dict[str, Any]] = []
        self._open: str | None = None
        self._sequence = 0
        self._reasoning = "response.reasoning" if open_responses_names else "response.reasoning_text"

    def document(self) -> dict[str, Any]:
        fields = self._request.fields
        echoed = {name: fields.get(name) if fields.has(name) else default for name, default in ECHOED.items()}
        previous = self._request.ask.previous
        effort = self._request.ask.setting.effort
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": self._completed_at,
            "status": self.status,
            "incomplete_details": self._incomplete,
            "error": self._error,
            "model": self._model,
            "previous_response_id": None if previous is None else PREFIX + previous,
            "output": [dict(item) for item in self._output],
            "tools": [tool_json(tool) for tool in self._request.ask.setting.tools],
            "reasoning": {"effort": effort, "summary": "detailed" if self._request.summary else None},
            "usage": None if self._usage is None else usage_json(self._usage),
            **echoed,
            "text": {"format": {"type": "text"}, **(fields.get("text") or {})},
        }

    def begin(self) -> list[Told]:
        return [self._whole("response.created"), self._whole("response.in_progress")]

    def queued(self) -> list[Told]:
        """What a background response begins with."""
        self.status = "queued"
        told = [self._whole("response.created"), self._whole("response.queued")]
        self.status = "in_progress"
        return [*told, self._whole("response.in_progress")]

    def take(self, event: ChatEvent, logprobs: list[dict[str, Any]]) -> list[Told]:
        """What a piece of the reply changes."""
        match event:
            case ReasoningDelta(text):
                return [*self._opened("reasoning"), *self._reason(text)]
            case ContentDelta(text):
                return [*self._opened("message"), *self._say(text, logprobs)]
            case ToolCallBegin(_, call_id, name):
                return [*self._close("completed"), *self._open_call(call_id, name)]
            case ToolArgumentsDelta(_, text):
                self._item["arguments"] += text
                return [self._of_item("response.function_call_arguments.delta", delta=text)]
            case ToolCallEnd(_, complete):
                return self._close("completed" if complete else "incomplete")
            case _:
                return []

    def finish(
        self,
        status: str,
        usage: Usage,
        *,
        completed_at: int | None,
        incomplete: str | None = None,
        error: Mapping[str, str] | None = None,
    ) -> list[Told]:
        """Close what is open; the last event is the terminal one."""
        told = self._close("completed" if status == "completed" else "incomplete")
        self.status = status
        self._usage = usage
        self._completed_at = completed_at if status == "completed" else None
        self._incomplete = None if incomplete is None else {"reason": incomplete}
        self._error = error
        terminal = {"completed": "response.completed", "failed": "response.failed"}.get(status, "response.incomplete")
        return [*told, self._whole(terminal)]

    @property
    def _item(self) -> dict[str, Any]:
        return self._output[-1]

    def _opened(self, kind: str) -> list[Told]:
        if self._open == kind:
            return []
        told = self._close("completed")
        self._open = kind
        if kind == "reasoning":
            item: dict[str, Any] = {"id": f"rs_{new_id()}", "type": "reasoning", "summary": [], "content": []}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": f"msg_{new_id()}", "type": "message", "role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["status"] = "in_progress"
        self._output.append(item)
        told.append(self._event("response.output_item.added", output_index=len(self._output) - 1, item=_copy(item)))
        item["content"] = [part]
        told.append(self._of_item("response.content_part.added", content_index=0, part=dict(part)))
        if kind == "reasoning" and self._request.summary:
            item["summary"] = [{"type": "summary_text", "text": ""}]
            told.append(
                self._of_item("response.reasoning_summary_part.added", summary_index=0, part=dict(item["summary"][0]))
            )
        return told

    def _open_call(self, call_id: str, name: str) -> list[Told]:
        self._open = "call"
        item = {
            "id": f"fc_{new_id()}",
            "type": "function_call",
            "call_id": call_id,
            "name": name,
            "arguments": "",
            "status": "in_progress",
        }
        self._output.append(item)
        return [self._event("response.output_item.added", output_index=len(self._output) - 1, item=dict(item))]

    def _reason(self, text: str) -> list[Told]:
        self._item["content"][0]["text"] += text
        told = [self._of_item(f"{self._reasoning}.delta", content_index=0, delta=text)]
        if self._request.summary:
            self._item["summary"][0]["text"] += text
            told.append(self._of_item("response.reasoning_summary_text.delta", summary_index=0, delta=text))
        return told

    def _say(self, text: str, logprobs: list[dict[str, Any]]) -> list[Told]:
        part = self._item["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        return [self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def _close(self, status: str) -> list[Told]:
        kind, self._open = self._open, None
        if kind is None:
            return []
        item = self._item
        item["status"] = status
        told: list[Told] = []
        if kind == "call":
            told.append(
                self._of_item("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
            )
        else:
            part = item["content"][0]
            if kind == "reasoning":
                told.append(self._of_item(f"{self._reasoning}.done", content_index=0, text=part["text"]))
            else:
                told.append(
                    self._of_item(
                        "response.output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"]
                    )
                )
            told.append(self._of_item("response.content_part.done", content_index=0, part=dict(part)))
            if kind == "reasoning" and self._request.summary:
                summary = item["summary"][0]
                told.append(
                    self._of_item("response.reasoning_summary_text.done", summary_index=0, text=summary["text"])
                )
                told.append(self._of_item("response.reasoning_summary_part.done", summary_index=0, part=dict(summary)))
        done = self._event("response.output_item.done", output_index=len(self._output) - 1, item=_copy(item))
        return [*told, done]

    def _whole(self, kind: str) -> Told:
        return self._event(kind, response=self.document())

    def _of_item(self, kind: str, **values: Any) -> Told:
        return self._event(kind, item_id=self._item["id"], output_index=len(self._output) - 1, **values)

    def _event(self, kind: str, **values: Any) -> Told:
        told = {"type": kind, "sequence_number": self._sequence, **values}
        self._sequence += 1
        return told


def _copy(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item that doesn't change with what comes later."""
    return {key: [dict(one) for one in value] if isinstance(value, list) else value for key, value in item.items()}


def tool_json(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A declared tool in the shape of this API."""
    function = tool["function"]
    return {
        "type": "function",
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
        "strict": False,
    }


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": usage.prompt - usage.cached},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.output,
    }
