"""Which places are known: by id, by what a conversation that led there said, and by what goes on from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class Known:
    """A place as it is looked up. `chain` is the semantic hash up to it; `response` says that it is a response
    with a document of its own (a chat completion has none). `fork` is its number if it is a fork of `previous`, else 0,
    and `forks` the highest that a fork of its own was given, as far as it was noted when the place was removed."""

    id: str
    namespace: str
    chain: str
    previous: str | None
    response: bool
    fork: int = 0
    forks: int = 0


class Catalogue:
    """All known places of this process and its store."""

    def __init__(self) -> None:
        self._by_id: dict[str, Known] = {}
        self._by_chain: dict[tuple[str, str], list[str]] = {}
        self._children: dict[str, list[str]] = {}
        self._forks: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, known: Known) -> None:
        if known.id in self._by_id:
            return
        self._by_id[known.id] = known
        if known.chain:
            self._by_chain.setdefault((known.namespace, known.chain), []).append(known.id)
        if known.previous is not None:
            self._children.setdefault(known.previous, []).append(known.id)
        if known.forks:
            self.forked(known.id, known.forks)

    def remove(self, place_id: str) -> Known | None:
        """Forget a place; what was known of it, to be added again if it is there still."""
        forks = self._forks.pop(place_id, 0)
        known = self._by_id.pop(place_id, None)
        if known is None:
            return None
        _drop(self._by_chain, (known.namespace, known.chain), place_id)
        if known.previous is not None:
            _drop(self._children, known.previous, place_id)
        return replace(known, forks=forks)

    def get(self, place_id: str, namespace: str) -> Known | None:
        known = self._by_id.get(place_id)
        return known if known is not None and known.namespace == namespace else None

    def deepest(self, namespace: str, chains: Sequence[str]) -> tuple[str, int] | None:
        """The latest place whose conversation is the longest beginning of this one, and how many messages that is."""
        for count in range(len(chains), 0, -1):
            ids = self._by_chain.get((namespace, chains[count - 1])) if chains[count - 1] else None
            if ids:
                return ids[-1], count
        return None

    def children(self, place_id: str) -> tuple[str, ...]:
        return tuple(self._children.get(place_id, ()))

    def next_fork(self, place_id: str) -> int:
        """A number for a fork of a place, by which it draws: two that are made at once have two, and none has that of
        a fork that is there, that others were built on, or that was deleted since the start."""
        children = self.children(place_id)  # as many as there are, for forks of before numbers were kept
        taken = (self._forks.get(place_id, 0), len(children), *(self._by_id[child].fork for child in children))
        number = self._forks[place_id] = max(taken) + 1
        return number

    def forked(self, place_id: str, number: int) -> None:
        """Give no fork of a place this number or one below it any more."""
        if place_id in self._by_id:
            self._forks[place_id] = max(self._forks.get(place_id, 0), number)


Key = TypeVar("Key")


def _drop(table: dict[Key, list[str]], key: Key, place_id: str) -> None:
    ids = [one for one in table.pop(key, []) if one != place_id]
    if ids:
        table[key] = ids
