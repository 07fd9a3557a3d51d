"""The two questions a monitor asks: yes or no, and a line of text."""

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static

from serai.runtime.monitor.text import printable

_BOX_CSS = """
    align: center middle;
    & > Vertical {
        width: 60; max-width: 100%; height: auto; max-height: 100%;
        border: round $primary; background: $surface; padding: 0 1;
    }
    & Horizontal { height: auto; align-horizontal: right; }
    & Button { margin-left: 2; }
    & Input { background: $boost; }
"""


class Confirm(ModalScreen[bool]):
    """A question that something irreversible depends on; the answer is no unless it is said otherwise."""

    DEFAULT_CSS = "Confirm {" + _BOX_CSS + "}"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", show=False),
        Binding("n,escape,q", "answer(False)", show=False),
    ]

    def __init__(self, question: str, verb: str) -> None:
        super().__init__()
        self._question = question
        self._verb = verb

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Content(printable(self._question)))
            with Horizontal():
                yield Button(Content(f"{self._verb} (y)"), id="yes", compact=True, variant="error")
                yield Button(Content("leave it (n)"), id="no", compact=True)

    def on_mount(self) -> None:
        self.query_one("#no", Button).focus()

    @on(Button.Pressed)
    def _pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)


class Ask(ModalScreen[str | None]):
    """A line of text; None when the question was left."""

    DEFAULT_CSS = "Ask {" + _BOX_CSS + "}"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", show=False)]

    def __init__(self, question: str, value: str = "") -> None:
        super().__init__()
        self._question = question
        self._value = value

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Content(printable(self._question)))
            yield Input(printable(self._value), compact=True)

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)

    def action_leave(self) -> None:
        self.dismiss(None)
