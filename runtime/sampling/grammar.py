"""Grammars: which tokens may come next, as a pure function of what the turn has written so far.

A `Grammar` is compiled once and shared. A `Written` is a point in it: the tokens of a turn up to somewhere. It is a
value (contract, g): forks share it, a resumed session makes it again from its token ids, and nobody sees that a matcher
moves along behind it. The event loop only makes new points, which costs nothing; the engine thread asks what they
allow.

The matching is llguidance's (an Earley parser over a regex lexer, in Rust, 7.6 MB without dependencies; xgrammar 0.2.9
requires torch, transformers and triton). Over 163,840 tokens a mask takes 10 to 150 µs, and the interpreter lock is
free meanwhile. Masks hold for the engine's version, so the digest that a session records has it.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from serai.runtime.errors import BadParameter, GrammarFailed
from serai.runtime.text.tokenizer import Tokenizer

MOST_GRAMMAR_BYTES = 1 << 20
"""Larger grammars are refused before anything is compiled."""

MOST_WHITESPACE = 20
"""Characters of white space between two parts of JSON; without an end to it a model can write nothing else."""

KEPT_GRAMMARS = 64

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""String formats that are held. Others say something to people only, as JSON Schema has it by default."""


class Grammar:
    """A compiled grammar over one vocabulary. Made by `Grammars.compile`."""

    def __init__(self, matcher: Any, vocab_size: int, digest: str) -> None:
        self.vocab_size = vocab_size
        self.digest = digest
        self._matcher = matcher
        self._lock = threading.Lock()
        self.start = Written(self, None, ())

    def fresh_matcher(self) -> Any:
        """A matcher at the start, the caller's own."""
        return self._matcher.deep_copy()

    def __repr__(self) -> str:
        return f"<Grammar {self.digest[:12]}>"


class Written:
    """What a turn has written, as its grammar sees it. `after` is free; the rest is for the engine thread.

    Only the newest point of a line has the matcher and a mask: what the others allow is found again if it is asked.
    """

    __slots__ = ("_allowed", "_before", "_forced", "_matcher", "_tokens", "grammar")

    def __init__(self, grammar: Grammar, before: "Written | None", tokens: tuple[int, ...]) -> None:
        self.grammar = grammar
        self._before = before
        self._tokens = tokens
        self._matcher: Any = None
        self._allowed: NDArray[np.bool_] | None = None
        self._forced: tuple[int, ...] | None = None

    def after(self, *tokens: int) -> "Written":
        """The point so many tokens further on, whether the grammar allows them or not."""
        return Written(self.grammar, self, tokens) if tokens else self

    @property
    def forced(self) -> tuple[int, ...]:
        """The tokens that can only follow, as far as they are known already (see `look_ahead`)."""
        return self._forced or ()

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next, bool `[vocab_size]`, at least one of them. Not to be written to.

        Raises `BadParameter` if what was written is not of the grammar, `GrammarFailed` if the next step is too much.
        """
        with self.grammar._lock:
            if self._allowed is None:
                if self._reach().is_stopped():
                    raise GrammarFailed(
                        "what it describes is complete, and none of its stop tokens ended the generation"
                    )
                packed = np.frombuffer(self._reach().compute_bitmask(), np.uint8)
                allowed = np.unpackbits(packed, count=self.grammar.vocab_size, bitorder="little").view(np.bool_)
                if not allowed.any():
                    raise GrammarFailed(self._reach().get_error() or "no token can follow")
                self._allowed = allowed
            return self._allowed

    def look_ahead(self) -> None:
        """Find what is `forced`."""
        with self.grammar._lock:
            if self._forced is None:
                self._forced = tuple(self._reach().compute_ff_tokens())

    def _reach(self) -> Any:
        """The matcher, moved here: from the nearest point before this that has it, or anew from the start."""
        if self._matcher is not None:
            return self._matcher
        path: list[int] = []
        point: Written | None = self
        matcher = None
        while point is not None and matcher is None:
            path[:0] = point._tokens
            point = point._before
            if point is not None:
                matcher, point._matcher = point._matcher, None
                point._allowed = point._allowed if point is self.grammar.start else None
        if matcher is None:
            matcher = self.grammar.fresh_matcher()
        if path and not matcher.consume_tokens(path):
            raise BadParameter(
                f"what this turn has written does not follow its grammar: {_first_line(matcher.get_error())}; begin "
                "the turn with the grammar it is to have"
            )
        self._matcher = matcher
        return matcher


class Grammars:
    """Compiles grammars for one tokenizer and keeps the last ones. Safe to use from several threads.

    Making one takes about two seconds for 163,840 tokens, and the interpreter lock for part of them.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None) -> None:
        try:
            import llguidance
        except ModuleNotFoundError:
            raise BadParameter("grammars need llguidance; install it with: pip install 'serai[server]'") from None
        self._engine = llguidance
        self._size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Words(tokenizer)), n_vocab=self._size)
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, text: str) -> Grammar:
        """The grammar a text in llguidance's variant of Lark describes. Milliseconds, more for a large one: off the
        event loop. Raises `BadParameter` for one that can't be."""
        size = len(text.encode())
        if size > MOST_GRAMMAR_BYTES:
            raise BadParameter(f"the grammar has {size:,} bytes, and at most {MOST_GRAMMAR_BYTES:,} are read")
        with self._lock:
            if text in self._kept:
                self._kept.move_to_end(text)
                return self._kept[text]
        matcher = self._engine.LLMatcher(self._tokenizer, self._engine.LLMatcher.grammar_from_lark(text), log_level=0)
        if matcher.is_error():
            raise BadParameter(f"the grammar can't be held: {_first_line(matcher.get_error())}")
        digest = blake3(f"llguidance {self._engine.__version__}\n{text}".encode()).hexdigest()
        grammar = Grammar(matcher, self._size, digest)
        with self._lock:
            self._kept[text] = grammar
            while len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return grammar


class _Words:
    """A tokenizer as llguidance asks for it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode: Callable[[str], list[int]] = tokenizer.encode
        self.tokens = [tokenizer.token_bytes(token, control=True) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        # The engine ends a text with this token by itself; grammars here name their stop tokens, so it is another.
        self.eos_token_id = tokenizer.special_tokens.get("[PAD]", tokenizer.vocab_size - 1)

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def ids_rule(ids: Sequence[int]) -> str:
    """These tokens, one after the other."""
    return " ".join(f"<[{token}]>" for token in ids)


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """JSON that a schema allows: members in the schema's order, bounded white space between parts.

    What llguidance can't hold (`oneOf` whose parts overlap, `not`, `uniqueItems`) is an error when it is compiled.
    """
    held = _held(schema)
    held = {} if held is True else {"not": {}} if held is False else held
    options = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MOST_WHITESPACE}}}"}
    return "%json " + json.dumps({**held, "x-guidance": options})


_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_NO_SCHEMAS = ("const", "enum", "default", "examples", "required")


def _held(schema: Any) -> Any:
    """A schema without the formats that mean nothing here, and without options of the grammar engine's own."""
    if isinstance(schema, list):
        return [_held(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NO_SCHEMAS:
            result[key] = value
        elif key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            result[key] = {name: _held(inner) for name, inner in value.items()}
        elif key != "x-guidance" and (key != "format" or value in FORMATS):
            result[key] = _held(value)
    return result


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:300]
