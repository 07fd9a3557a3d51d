"""Which prompt format a model reads, and the check that its tokenizer really spells it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serai.runtime.chat import k2_tokens, k3_tags
from serai.runtime.chat.conversation import Cursor, Markup, MintCallId, ReplyParser
from serai.runtime.chat.errors import ChatFormatMismatch
from serai.runtime.chat.grammars import Held
from serai.runtime.chat.k2 import K2Markup
from serai.runtime.chat.k3 import K3Markup
from serai.runtime.chat.segments import Segment, Tokenizer, encode

FIRST_RELEASE_ID = 163_584
"""Where the control tokens of Kimi's own vocabulary begin. A tokenizer with markers from here on is numbered like the
release, and must then be so throughout; smaller vocabularies number them as they like."""

K3_RELEASE_IDS = {
    "[BOS]": 163584,
    "[EOS]": 163585,
    "<|end_of_msg|>": 163586,
    "<|open|>": 163587,
    "<|close|>": 163588,
    "<|sep|>": 163589,
    "[start_header_id]": 163590,
    "[end_header_id]": 163591,
    "[EOT]": 163593,
    "<|media_begin|>": 163602,
    "<|media_content|>": 163603,
    "<|media_end|>": 163604,
    "<|media_pad|>": 163605,
    "<osagent_mode>": 163649,
    "[UNK]": 163838,
    "[PAD]": 163839,
}
K2_RELEASE_IDS = {
    "[EOS]": 163585,
    "<|im_end|>": 163586,
    "<|im_user|>": 163587,
    "<|im_assistant|>": 163588,
    "<|im_system|>": 163594,
    "<|tool_calls_section_begin|>": 163595,
    "<|tool_calls_section_end|>": 163596,
    "<|tool_call_begin|>": 163597,
    "<|tool_call_argument_begin|>": 163598,
    "<|tool_call_end|>": 163599,
    "<|im_middle|>": 163601,
}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """A prompt format bound to the tokenizer of one model, which has been found to spell it."""

    markup: Markup
    tokenizer: Tokenizer
    stop_ids: frozenset[int]

    @property
    def id(self) -> str:
        """Goes into the fingerprint of snapshots: with another format the same conversation has other ids."""
        return self.markup.id

    def encode(self, segments: Sequence[Segment]) -> list[int]:
        return encode(segments, self.tokenizer)

    def parser(self, cursor: Cursor, mint: MintCallId) -> ReplyParser:
        return self.markup.parser(cursor, self.tokenizer, mint)

    def grammar(self, cursor: Cursor, held: Held) -> str:
        return self.markup.grammar(cursor, held, self.tokenizer)


@dataclass(frozen=True, slots=True)
class _Family:
    markup: Markup
    required: tuple[str, ...]
    together: tuple[str, ...]  # all or none of these
    release: Mapping[str, int]


_K3 = _Family(
    K3Markup(),
    (k3_tags.OPEN, k3_tags.CLOSE, k3_tags.SEP, k3_tags.END_OF_MESSAGE, k3_tags.END_OF_TEXT),
    (),
    K3_RELEASE_IDS,
)
_K2 = _Family(K2Markup(), k2_tokens.TURN_TOKENS, k2_tokens.TOOL_TOKENS, K2_RELEASE_IDS)
_FAMILIES = {"kimi_k3": _K3, "kimi_linear": _K2}


def chat_format_id(model_type: str) -> str | None:
    """The id of the format of a model whose config.json has this `model_type`, or None if no format is known for it."""
    family = _FAMILIES.get(model_type)
    return None if family is None else family.markup.id


def chat_format_for(model_type: str, tokenizer: Tokenizer) -> ChatFormat:
    """The format of a model by the outermost `model_type` of its config.json (kimi_k3 or kimi_linear).

    Raises ChatFormatMismatch if there is none, or if the tokenizer lacks the format's control tokens, numbers them
    unlike the release, or would let text become one.
    """
    family = _FAMILIES.get(model_type)
    if family is None:
        raise ChatFormatMismatch(
            f"no prompt format is known for model_type {model_type!r}, only for {', '.join(_FAMILIES)}; "
            "use a session with token ids or plain text"
        )
    _check_names(model_type, family, tokenizer.special_tokens)
    _check_text_door(family, tokenizer)
    known = tokenizer.special_tokens
    stops = frozenset(known[name] for name in family.markup.stop_names if name in known)
    return ChatFormat(family.markup, tokenizer, stops)


def _check_names(model_type: str, family: _Family, known: Mapping[str, int]) -> None:
    absent = [name for name in family.required if name not in known]
    some = [name for name in family.together if name in known]
    absent += [name for name in family.together if some and name not in known]
    if absent:
        others = [other for other in _FAMILIES.items() if other[1] is not family and other[1].required[0] in known]
        hint = f"; it has those of {others[0][0]}, whose tokenizer_config.json this may be" if others else ""
        raise ChatFormatMismatch(
            f"the tokenizer has no control token {' or '.join(absent)}, and prompts of {model_type} are made of them"
            f"{hint}; put the model's own tokenizer files beside its weights"
        )
    if known[family.required[0]] < FIRST_RELEASE_ID:
        return
    for name, expected in family.release.items():
        if name not in known and name in family.together:
            continue
        if known.get(name) != expected:
            raise ChatFormatMismatch(
                f"the tokenizer gives {name} the id {known.get(name)}, but in {model_type} it is {expected}; "
                "put the model's own tokenizer files beside its weights"
            )


def _check_text_door(family: _Family, tokenizer: Tokenizer) -> None:
    for name in (*family.required, *family.together):
        leaked = tokenizer.special_ids.intersection(tokenizer.encode(name))
        if leaked:
            raise ChatFormatMismatch(
                f"the tokenizer turns the text {name!r} into control token {min(leaked)}, so any user could forge a "
                "turn; its text door must know no control tokens"
            )
