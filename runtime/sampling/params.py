"""How a generation chooses its tokens: every knob, its neutral value, and what it may be."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from types import MappingProxyType
from typing import Any

from serai.runtime.errors import BadParameter
from serai.runtime.sampling.random import SEED_BITS

MAX_LOGPROBS = 20
MAX_BIAS = 100.0
MAX_TOKENS_LIMIT = 2**63 - 1
"""Nothing is allocated by `max_tokens`; this only keeps it within what a store's integers hold."""
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
"""Each character of text is compared with every stop string, and up to the longest one is held back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Values are checked when the object is made: `BadParameter` says in one sentence what is wrong.

    A bool is not a number here, nor is a float an integer or a string anything but a stop string.

    The defaults are the neutral ones of the OpenAI interface and vLLM: draw from the model's own distribution.

    max_tokens          most tokens to generate, at least 1
    temperature         divides the logits; 0 is greedy, whatever the filters say
    top_k               keep the k most likely tokens; 0 keeps all
    top_p               keep the fewest most likely tokens that reach this share of the probability; over 0, 1 keeps all
    min_p               drop tokens less likely than this times the likeliest, 0 to 1; 0 drops none
    repetition_penalty  for every id of the session so far, divides a positive logit and multiplies a negative one;
                        over 0, 1 is neutral
    presence_penalty    taken once from the logit of every id generated in this turn; -2 to 2
    frequency_penalty   taken as often as the id was generated in this turn; -2 to 2
    logit_bias          id -> added to its logit; -100 to 100
    seed                0 to 2**64 - 1; None draws one, which the session records
    stop                strings that end the generation and are not shown; one may be given as a plain str
    stop_token_ids      ids that end the generation, beside the model's own
    min_tokens          the turn can't end with a stop token before it has this many; at most `max_tokens`
    ignore_eos          the model's own stop tokens don't end the generation
    logprobs            None for none, else how many alternatives to report with each token's, 0 to 20
    """

    max_tokens: int = 512
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._set("max_tokens", _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT))
        self._set("temperature", _number("temperature", self.temperature, 0.0, math.inf))
        self._set("top_k", _integer("top_k", self.top_k, 0, MAX_TOKENS_LIMIT))
        self._set("top_p", _number("top_p", self.top_p, 0.0, 1.0, above=True))
        self._set("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        penalty = _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, above=True)
        self._set("repetition_penalty", penalty)
        self._set("presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        self._set("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        self._set("logit_bias", _biases(self.logit_bias))
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, 0, 2**SEED_BITS - 1))
        self._set("stop", _stops(self.stop))
        self._set("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0, self.max_tokens))
        if not isinstance(self.ignore_eos, bool):
            raise BadParameter(f"ignore_eos must be True or False, and is {self.ignore_eos!r}")
        if self.logprobs is not None:
            self._set("logprobs", _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `BadParameter` if `logit_bias` or `stop_token_ids` names an id the model doesn't have."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            outside = next((token for token in ids if token >= vocab_size), None)
            if outside is not None:
                raise BadParameter(f"{name} has the token id {outside}, but the model's ids end at {vocab_size - 1}")

    @property
    def penalizes(self) -> bool:
        """Whether any penalty is other than neutral."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def to_record(self) -> dict[str, Any]:
        """As plain JSON values, from which `from_record` gives an equal object back."""
        record: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        record["logit_bias"] = [[token, bias] for token, bias in sorted(self.logit_bias.items())]
        record["stop"] = list(self.stop)
        record["stop_token_ids"] = list(self.stop_token_ids)
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "SamplingParams":
        """From what `to_record` gave; names it lacks take their defaults, and unknown ones are a `BadParameter`."""
        unknown = sorted(record.keys() - {each.name for each in fields(cls)})
        if unknown:
            raise BadParameter(
                f"sampling has no parameter {unknown[0]!r}; a newer version may have written this record"
            )
        values = dict(record)
        try:
            values["logit_bias"] = dict(record.get("logit_bias", ()))
        except (TypeError, ValueError) as error:
            raise BadParameter("logit_bias in a record must be a list of [id, bias] pairs") from error
        return cls(**values)

    def _set(self, name: str, value: object) -> None:
        """Replace a value by its checked and frozen form, once, while the object is being made."""
        object.__setattr__(self, name, value)


def _integer(name: str, value: object, least: int, most: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # a TypeError is the answer for what isn't one
    except TypeError:
        raise BadParameter(f"{name} must be an integer from {least} to {most}, and is {value!r:.60}") from None
    if not least <= number <= most:
        raise BadParameter(f"{name} must be from {least} to {most}, and is {number}")
    return number


def _number(name: str, value: object, least: float, most: float, *, above: bool = False) -> float:
    """A finite float of the range; `above` leaves `least` itself out."""
    start = f"over {least:g}" if above else f"{least:g} or more"
    valid = start if most == math.inf else f"{start} and at most {most:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise BadParameter(f"{name} must be a number, {valid}, and is {value!r:.60}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not least <= number <= most or (above and number == least):
        raise BadParameter(f"{name} must be {valid}, and is {number:g}")
    return number


def _biases(value: object) -> Mapping[int, float]:
    if not isinstance(value, Mapping):
        raise BadParameter(f"logit_bias must map token ids to numbers, and is {value!r:.60}")
    checked = {
        _integer("an id in logit_bias", token, 0, MAX_TOKENS_LIMIT): _number(
            f"logit_bias of id {token}", bias, -MAX_BIAS, MAX_BIAS
        )
        for token, bias in value.items()
    }
    return MappingProxyType(checked)


def _stops(value: object) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, Iterable):
        raise BadParameter(f"stop must be a string or a list of strings, and is {value!r:.60}")
    checked: list[str] = []
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise BadParameter(
                f"each stop must be a string of 1 to {MAX_STOP_CHARS} characters, and one is {stop!r:.60}"
            )
        try:
            stop.encode()
        except UnicodeEncodeError:
            raise BadParameter(f"a stop must be whole characters, and {stop!r:.60} has half of one") from None
        checked.append(stop)
    if len(checked) > MAX_STOPS:
        raise BadParameter(f"stop may have up to {MAX_STOPS} strings, and has {len(checked)}")
    return tuple(checked)


def _ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise BadParameter(f"{name} must be a list of token ids, and is {value!r:.60}")
    return tuple(_integer(f"an id in {name}", token, 0, MAX_TOKENS_LIMIT) for token in value)
