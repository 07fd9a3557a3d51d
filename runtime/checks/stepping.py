"""Steps taken by hand: states in, states out, without sessions or an event loop. For checks of the engine itself."""

from collections.abc import Iterable, Sequence

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from serai.runtime.engine import Engine
from serai.runtime.models.open_model import LoadedModel
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.sampling.sample import TokenCounts
from serai.runtime.state import State, StatePool, kda_view, page_view, tails_view
from serai.runtime.step import AbortFlag, Draw, Segment, StepPlan

Tokens = NDArray[np.int32]


class Stepper:
    """Runs steps of one model on states of one pool."""

    def __init__(self, loaded: LoadedModel, pool: StatePool) -> None:
        self.pool = pool
        self.max_rows = loaded.model.max_rows
        self._engine = Engine(loaded.model, loaded.layout)
        self._vocab_size = loaded.model.config.vocab_size

    def feed(
        self, parts: Sequence[tuple[State, Tokens]], draws: Sequence[Draw | None] = ()
    ) -> tuple[list[State], list[int]]:
        """One step that feeds every part, at least one token each and `max_rows` together, and draws where asked.

        Gives the new states, and the tokens drawn in the order of the draws that aren't None. Takes over the caller's
        references to the states. Raises what the engine reports for a session, such as `LogitsInvalid`.
        """
        rows = sum(len(tokens) for _, tokens in parts)
        if rows > self.max_rows:
            raise ValueError(f"a step of {rows} rows does not fit a scratch of {self.max_rows}")
        drafts = [self.pool.draft(state, len(tokens), with_logits=True) for state, tokens in parts]
        wanted = list(draws) or [None] * len(parts)
        segments = tuple(
            Segment(state, tokens, draft, () if draw is None else (draw,))
            for (state, tokens), draft, draw in zip(parts, drafts, wanted, strict=True)
        )
        result = self._engine.step(StepPlan(segments, AbortFlag()))
        for outcome in result.segments:
            if outcome.error is not None:
                raise outcome.error
        after = [draft.commit() for draft in drafts]
        for state, _ in parts:
            state.release()
        return after, [drawn.token for outcome in result.segments for drawn in outcome.drawn]

    def run(self, tokens: Tokens, calls: Iterable[int] = (), *, after: State | None = None) -> State:
        """The state after `tokens`, fed in calls of those sizes (by default as few as possible) from `after` or empty.

        Takes over the caller's reference to `after`.
        """
        state = self.pool.empty() if after is None else after
        sizes = list(calls) or [
            min(self.max_rows, len(tokens) - start) for start in range(0, len(tokens), self.max_rows)
        ]
        start = 0
        for size in sizes:
            (state,), _ = self.feed([(state, tokens[start : start + size])])
            start += size
        return state

    def generate(
        self, prompt: Tokens, count: int, params: SamplingParams, beside: Sequence[Tokens] = ()
    ) -> tuple[int, ...]:
        """`count` tokens drawn after the prompt; with `beside`, another session is fed one piece of it each step."""
        if params.seed is None:
            raise ValueError("a generation that is to be compared needs a seed")
        state, other = self.pool.empty(), self.pool.empty()
        counts = TokenCounts(self._vocab_size, prompt.tolist())
        tokens: list[int] = []
        feeding = prompt
        for number in range(count):
            parts = [(state, feeding)]
            draws: list[Draw | None] = [Draw(params, counts, params.seed, 0, len(prompt) + number)]
            if number < len(beside):
                parts.append((other, beside[number]))
                draws.append(None)
            states, (token,) = self.feed(parts, draws)
            state = states[0]
            other = states[1] if number < len(beside) else other
            counts.push(token)
            tokens.append(token)
            feeding = np.array([token], dtype=np.int32)
        state.release()
        other.release()
        return tuple(tokens)

    def bits(self, state: State) -> bytes:
        """A digest of everything the state holds: equal exactly when every bit is. The caller keeps the state."""
        layout = self.pool.layout
        digest = blake3(state.position.to_bytes(8, "little"))
        if state.fixed is not None:
            digest.update(kda_view(layout, state.fixed).tobytes())
            digest.update(tails_view(layout, state.fixed).tobytes())
        if state.logits is not None:
            digest.update(state.logits.array.tobytes())
        for page, rows in zip(state.table.pages, layout.page_rows(state.position), strict=True):
            digest.update(page_view(layout, page)[:, :rows].tobytes())
        return digest.digest()

    def ended(self, state: State) -> bytes:
        """`bits` of a state that is done with."""
        bits = self.bits(state)
        state.release()
        return bits
