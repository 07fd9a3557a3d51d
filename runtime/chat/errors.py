"""The two errors of the chat layer."""

from serai.runtime.errors import BadParameter, ConfigInvalid


class PromptInvalid(BadParameter):
    """A conversation or its options can't be rendered; the sentence says what to change.

    Attributes: `message_index` (position in the list of messages given, or None when no single message is at fault).
    """

    def __init__(self, what: str, *, message_index: int | None = None) -> None:
        self.message_index = message_index
        super().__init__(what if message_index is None else f"message {message_index}: {what}")


class ChatFormatMismatch(ConfigInvalid):
    """A model's tokenizer doesn't carry the control tokens of the model's own prompt format, so no chat is possible.

    Loaded anyway, such a tokenizer would spell every marker as ordinary text, round-trip it perfectly, and feed the
    model prompts it was never trained on.
    """
