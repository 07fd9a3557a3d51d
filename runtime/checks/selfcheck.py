"""The determinism contract (`serai.runtime.checks`), run on a user's own model and machine.

Every check compares bits, never within a tolerance, and draws its token ids from a seed, so no tokenizer is needed. All
but the reference runs use a pool that fills every buffer with NaN before handing it out: whoever trusts an old buffer
is found out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serai.checkpoints.names import new_id
from serai.checkpoints.nodes import NodeKind, NodeRecord
from serai.checkpoints.store import Store
from serai.kernels.threads import set_threads, threads
from serai.runtime.checks.evaluation import WAYS, evaluate
from serai.runtime.checks.stepping import Stepper, Tokens
from serai.runtime.models.open_model import LoadedModel
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.state import State, StatePool, fill, snapshot_of

LENGTHS = (1, 2, 5, 17, 33, 64, 70)
"""Prompts of seven sessions: shorter than a convolution, around a kernel's row block, and around a latent page (64)."""

SPLIT_TOKENS = 100
SPLITS = (1, 2, 3, 4, 15, 16, 17, 31, 32, 33, 63, 64, 65, 99)
PIECES = (1, 7, 64)
FORK_AT = 40
BRANCHES = 3
BRANCH_TOKENS = 30
PAUSES_AT = (1, 3, 40, 64, 65)
RESUMED_TOKENS = 12
GENERATED_TOKENS = 16
SAMPLED = SamplingParams(
    temperature=0.8, top_k=50, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1, seed=7
)
GREEDY = SamplingParams(temperature=0.0, seed=0)


@dataclass(frozen=True, slots=True)
class Promise:
    """One sentence of the contract: in how many cases it was put to the test, and in how many it held."""

    promise: str
    cases: int
    held: int

    @property
    def kept(self) -> bool:
        return self.held == self.cases

    def to_json(self) -> dict[str, object]:
        return {"promise": self.promise, "cases": self.cases, "held": self.held}


def selfcheck(loaded: LoadedModel, *, store: Path, limit_bytes: int | None = None, seed: int = 0) -> Iterator[Promise]:
    """Put every promise to the test, one after the other.

    `store` is a folder that doesn't exist yet, for the snapshots; `limit_bytes` bounds the states in memory
    (`OutOfBudget` when that is too few). The promise about wide steps is for models that were loaded with room for
    them. Raises `LogitsInvalid` for a model that gives no finite numbers.
    """
    checks = _Checks(loaded, limit_bytes, seed)
    yield checks.ways()
    yield checks.company()
    yield checks.threads()
    yield checks.splits()
    if loaded.model.wide_rows > loaded.model.max_rows:
        yield checks.wide_steps()
    yield checks.forks()
    yield checks.pauses(store)
    yield checks.old_buffers()
    yield checks.sampling()
    yield checks.greedy()


class _Checks:
    """One method for each promise."""

    def __init__(self, loaded: LoadedModel, limit_bytes: int | None, seed: int) -> None:
        self._loaded = loaded
        self._limit_bytes = limit_bytes
        self._rng = np.random.default_rng(seed)
        self._vocab_size = loaded.model.config.vocab_size
        self._clean = self._stepper(poison=False)
        self._poisoned = self._stepper(poison=True)

    def ways(self) -> Promise:
        tokens = self._tokens(48)
        arrays = evaluate(self._loaded, tokens, 20, greedy=1)
        bits = [np.ascontiguousarray(arrays[way], dtype=np.float32).view(np.uint32) for way in WAYS]
        return _promise(
            "prefill, cached decode and step-by-step give the same logits",
            [bool(same) for other in bits[1:] for same in (bits[0] == other).all(axis=1)],
        )

    def company(self) -> Promise:
        prompts = [self._tokens(length) for length in LENGTHS]
        alone = [self._clean.ended(self._clean.run(prompt)) for prompt in prompts]
        lab = self._poisoned
        together, _ = lab.feed([(lab.pool.empty(), prompt) for prompt in prompts])
        return _promise(
            f"a session's bits are the same alone and among {len(prompts)}",
            [
                lab.ended(state) == bits
                for states in (together, self._ragged(prompts))
                for state, bits in zip(states, alone, strict=True)
            ],
        )

    def threads(self) -> Promise:
        """More threads than when the model was loaded can't be tried: the scratch was made for those."""
        prompts = [self._tokens(length) for length in LENGTHS]
        usual = threads()
        outcomes = []
        try:
            for count in (1, usual):
                set_threads(count)
                states = [self._poisoned.run(prompt) for prompt in prompts] + self._ragged(prompts, seed=1)
                outcomes.append([self._poisoned.ended(state) for state in states])
        finally:
            set_threads(usual)
        one, many = outcomes
        return _promise(
            f"1 thread and {usual} give the same bits",
            [left == right for left, right in zip(one, many, strict=True)],
        )

    def splits(self) -> Promise:
        tokens = self._tokens(SPLIT_TOKENS)
        whole = self._clean.ended(self._clean.run(tokens))
        calls = [[at, SPLIT_TOKENS - at] for at in SPLITS]
        for size in PIECES:
            calls.append([min(size, SPLIT_TOKENS - start) for start in range(0, SPLIT_TOKENS, size)])
        return _promise(
            "any split of a prompt into calls gives the same bits",
            [self._poisoned.ended(self._poisoned.run(tokens, sizes)) == whole for sizes in calls],
        )

    def wide_steps(self) -> Promise:
        """Read by one session, and by several of which one begins in the middle of a prompt."""
        model, lab = self._loaded.model, self._stepper(poison=True)
        lab.max_rows = model.wide_rows
        tokens = self._tokens(model.max_rows + SPLIT_TOKENS)
        parts = [tokens[FORK_AT:], self._tokens(1), tokens[:FORK_AT]]
        begun = [lab.run(tokens[:FORK_AT]), lab.pool.empty(), lab.pool.empty()]
        together, _ = lab.feed(list(zip(begun, parts, strict=True)))
        expected = [self._clean.ended(self._clean.run(one)) for one in (tokens, *parts[1:], tokens)]
        return _promise(
            "long prompts read layer by layer give the bits of ordinary steps",
            [lab.ended(state) == bits for state, bits in zip([*together, lab.run(tokens)], expected, strict=True)],
        )

    def forks(self) -> Promise:
        prompt = self._tokens(FORK_AT)
        branches = [self._tokens(BRANCH_TOKENS) for _ in range(BRANCHES)]
        fresh = [self._clean.ended(self._clean.run(np.concatenate([prompt, branch]))) for branch in branches]
        lab = self._poisoned
        trunk = lab.run(prompt)
        before = lab.bits(trunk)
        states = [trunk.retain() for _ in branches]
        for token in range(BRANCH_TOKENS):
            states, _ = lab.feed(
                [(state, branch[token : token + 1]) for state, branch in zip(states, branches, strict=True)]
            )
        held = [lab.ended(state) == bits for state, bits in zip(states, fresh, strict=True)]
        return _promise(
            f"{BRANCHES} forks equal {BRANCHES} fresh runs, and leave what they came from as it was",
            [*held, lab.ended(trunk) == before],
        )

    def pauses(self, store: Path) -> Promise:
        tokens = self._tokens(max(PAUSES_AT) + RESUMED_TOKENS)
        held = []
        with Store.open(str(store)) as opened:
            for position in PAUSES_AT:
                end = position + RESUMED_TOKENS
                whole = self._clean.ended(self._clean.run(tokens[:end]))
                paused = self._poisoned.run(tokens[:position])
                resumed = self._paused_and_resumed(opened, paused, tokens[:position])
                held.append(self._poisoned.ended(self._poisoned.run(tokens[position:end], after=resumed)) == whole)
        return _promise("a session that was paused to disk and resumed goes on with the same bits", held)

    def old_buffers(self) -> Promise:
        prompts = [self._tokens(length) for length in LENGTHS]
        fresh = [self._stepper(poison=False) for _ in prompts]
        first = [lab.ended(lab.run(prompt)) for lab, prompt in zip(fresh, prompts, strict=True)]
        lab = self._poisoned
        return _promise(
            "buffers of earlier sessions, filled with NaN, leave no trace in later ones",
            [lab.ended(lab.run(prompt)) == bits for prompt, bits in zip(prompts, first, strict=True)],
        )

    def sampling(self) -> Promise:
        prompt = self._tokens(20)
        first = self._clean.generate(prompt, GENERATED_TOKENS, SAMPLED)
        again = self._poisoned.generate(prompt, GENERATED_TOKENS, SAMPLED)
        beside = self._poisoned.generate(prompt, GENERATED_TOKENS, SAMPLED, self._neighbour())
        return _promise(
            "the same seed draws the same tokens again, alone or with a neighbour", [again == first, beside == first]
        )

    def greedy(self) -> Promise:
        prompt = self._tokens(20)
        alone = self._clean.generate(prompt, GENERATED_TOKENS, GREEDY)
        beside = self._poisoned.generate(prompt, GENERATED_TOKENS, GREEDY, self._neighbour())
        return _promise("greedy tokens are the same alone and with a neighbour", [beside == alone])

    def _stepper(self, *, poison: bool) -> Stepper:
        return Stepper(self._loaded, StatePool(self._loaded.layout, limit_bytes=self._limit_bytes, poison=poison))

    def _tokens(self, count: int) -> Tokens:
        return self._rng.integers(0, self._vocab_size, count, dtype=np.int32)

    def _neighbour(self) -> list[Tokens]:
        """What another session reads, step by step: pieces of several tokens and single ones."""
        return [self._tokens(1 + 5 * (number % 3)) for number in range(GENERATED_TOKENS)]

    def _ragged(self, prompts: list[Tokens], seed: int = 0) -> list[State]:
        """The states after the prompts, fed together in pieces of one to nine tokens; some sessions skip a step."""
        rng = np.random.default_rng(seed)
        lab = self._poisoned
        states = [lab.pool.empty() for _ in prompts]
        fed = [0] * len(prompts)
        while unfinished := [one for one, prompt in enumerate(prompts) if fed[one] < len(prompt)]:
            chosen = [one for one in unfinished if rng.random() < 0.8] or unfinished
            pieces = [prompts[one][fed[one] : fed[one] + int(rng.integers(1, 10))] for one in chosen]
            after, _ = lab.feed([(states[one], piece) for one, piece in zip(chosen, pieces, strict=True)])
            for one, piece, state in zip(chosen, pieces, after, strict=True):
                states[one] = state
                fed[one] += len(piece)
        return states

    def _paused_and_resumed(self, store: Store, state: State, tokens: Tokens) -> State:
        """The state, stored and read back into other buffers. Takes over the caller's reference."""
        lab, layout = self._poisoned, self._loaded.layout
        node = NodeRecord(session_id=new_id(), kind=NodeKind.ROOT, position=len(tokens), tokens=tokens)
        store.record(node)
        store.save(node.id, snapshot_of(layout, state), self._loaded.fingerprint, reason="selfcheck")
        state.release()
        empty = lab.pool.empty()
        draft = lab.pool.draft(empty, len(tokens), with_logits=True)
        fill(draft, layout, store.load(node.id, self._loaded.fingerprint))
        empty.release()
        return draft.commit()


def _promise(sentence: str, held: list[bool]) -> Promise:
    return Promise(sentence, cases=len(held), held=sum(held))
