"""A session's live state as an immutable value, and the pool its buffers come from.

A `State` is everything the model remembers at one token position: the *fixed* block (KDA matrices and convolution
tails), the latents in pages, and the next-token logits. It never changes. A step reads one state and writes a
`Draft`; committing the draft gives the next state, abandoning it gives everything back. So a fork is one reference
more, an undone step leaves nothing behind, and no two sessions can ever write into the same memory.

Layout of a fixed block (float32, one contiguous run): KDA `[kda_layers, heads * panels, head_dim, 16]`, each head's
matrix, key by value, in panels of 16 value columns (`kernels/kda_panels.py`); then tails `[kda_layers, 3 (q, k, v),
taps, heads * head_dim]`, oldest tap first.
Layout of a page: `[mla_layers, page_tokens, row_items]`, of the latent type's dtype (`LatentType`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.snapshot import LatentPage, PageIdentity, Snapshot, StateLayout
from serai.runtime.errors import OutOfBudget
from serai.runtime.memory.accounts import Account, Accounts
from serai.runtime.memory.slabs import Slabs


class Part(Enum):
    """What a buffer holds."""

    FIXED = "fixed"
    PAGE = "page"
    LOGITS = "logits"


def part_bytes(layout: StateLayout, part: Part) -> int:
    """Bytes of one buffer of that kind."""
    if part is Part.FIXED:
        return 4 * (prod(layout.kda_shape) + prod(layout.conv_shape))
    if part is Part.PAGE:
        return layout.page_tokens * layout.token_bytes
    return 4 * layout.vocab


def pages_for(layout: StateLayout, tokens: int) -> int:
    """Pages that hold the latents of that many tokens; none for a model without MLA layers."""
    return -(-tokens // layout.page_tokens) if layout.mla_layers else 0


def session_bytes(layout: StateLayout, tokens: int) -> int:
    """Bytes of one state at that many tokens, nothing shared."""
    fixed = part_bytes(layout, Part.FIXED) + part_bytes(layout, Part.LOGITS) if tokens else 0
    return fixed + pages_for(layout, tokens) * part_bytes(layout, Part.PAGE)


def _one_more(refs: int) -> int:
    """What was given back may be somebody else's by now: to hold it again is to write into their state."""
    if refs < 1:
        raise AssertionError("a state was used after its last reference had been released")
    return refs + 1


class Buffer:
    """One run of memory from the pool, counted by its holders, and in the account of the namespace it was taken for.

    `claimed` matters for pages only: rows below it belong to some state, so only a writer that starts exactly there
    may write in place; any other writer copies the page first.
    """

    __slots__ = ("_pool", "_refs", "account", "address", "array", "claimed", "identity", "part")

    def __init__(self, pool: "StatePool", part: Part, array: NDArray[Any], account: Account) -> None:
        self._pool = pool
        self.account = account
        self._refs = 1
        self.part = part
        self.array = array
        self.address = int(array.ctypes.data)
        self.claimed = 0
        # Given to a full page, which nobody writes again, so that the store knows it without reading it.
        self.identity: PageIdentity | None = None

    @property
    def refs(self) -> int:
        return self._refs

    def retain(self) -> "Buffer":
        self._refs = _one_more(self._refs)
        return self

    def release(self) -> None:
        self._refs -= 1
        if self._refs == 0:
            self._pool._give_back(self)


class PageTable:
    """An immutable list of pages with their addresses ready for the kernels; counted, like the pages it holds."""

    __slots__ = ("_refs", "addresses", "pages")

    def __init__(self, pages: tuple[Buffer, ...]) -> None:
        self._refs = 1
        self.pages = pages
        self.addresses: NDArray[np.int64] = np.array([page.address for page in pages], dtype=np.int64)

    @property
    def refs(self) -> int:
        """How many states hold it."""
        return self._refs

    @property
    def is_alone(self) -> bool:
        """Whether one state holds it."""
        return self._refs == 1

    def retain(self) -> "PageTable":
        self._refs = _one_more(self._refs)
        return self

    def release(self) -> None:
        self._refs -= 1
        if self._refs == 0:
            for page in self.pages:
                page.release()


class State:
    """What the model remembers at `position`; immutable and counted.

    `logits` is float32 `[vocab_size]`, or None at position 0, where no next token is defined. `account` is that of its
    namespace, which everything that grows from it is taken for. `source` is the node whose snapshot it was read from,
    until a step after it has succeeded; `is_spoiled` says that the first one failed. `inexact` says that its bits are
    not those its token ids give: it comes of a snapshot that was stored with loss or by another build. The state itself
    says so, so that wherever it goes, and whatever is computed from it, is known to be.
    """

    __slots__ = ("_refs", "account", "fixed", "inexact", "is_spoiled", "logits", "position", "source", "table")

    def __init__(
        self, position: int, fixed: Buffer | None, table: PageTable, logits: Buffer | None, account: Account
    ) -> None:
        if (position == 0) != (fixed is None) or (logits is not None and fixed is None):
            raise ValueError(f"a state at position {position} needs a fixed block exactly when the position is not 0")
        self._refs = 1
        self.account = account
        self.position = position
        self.fixed = fixed
        self.table = table
        self.logits = logits
        self.source: str | None = None
        self.is_spoiled = False
        self.inexact = False

    def retain(self) -> "State":
        self._refs = _one_more(self._refs)
        return self

    def release(self) -> None:
        self._refs -= 1
        if self._refs:
            return
        if self.fixed is not None:
            self.fixed.release()
        if self.logits is not None:
            self.logits.release()
        self.table.release()

    @property
    def refs(self) -> int:
        """How many hold it."""
        return self._refs

    @property
    def is_alone(self) -> bool:
        """Whether it has one holder."""
        return self._refs == 1

    def buffers(self) -> Iterator[Buffer]:
        """Every buffer this state holds, for accounting."""
        if self.fixed is not None:
            yield self.fixed
        if self.logits is not None:
            yield self.logits
        yield from self.table.pages

    def __repr__(self) -> str:
        return f"<State at {self.position}, {len(self.table.pages)} pages>"


@dataclass(slots=True)
class Draft:
    """Room for the state `tokens` further on, while a step fills it.

    `copies` are `(from, to, rows)` of pages that the step must copy before it writes. Exactly one of `commit` and
    `abandon` ends a draft.
    """

    before: State
    tokens: int
    fixed: Buffer
    table: PageTable
    logits: Buffer | None
    copies: tuple[tuple[Buffer, Buffer, int], ...]
    _claims: tuple[tuple[Buffer, int, int], ...]

    def commit(self) -> State:
        """The new state; the caller owns it, and still owns `before`. It is inexact if that is."""
        before = self.before
        after = State(before.position + self.tokens, self.fixed, self.table, self.logits, before.account)
        after.inexact = before.inexact
        return after

    def abandon(self) -> None:
        """Give back every buffer and every claimed row, as if the step had never been planned."""
        for page, start, end in self._claims:
            if page.claimed == end:
                page.claimed = start
        self.fixed.release()
        if self.logits is not None:
            self.logits.release()
        self.table.release()


class StatePool:
    """Hands out and takes back the buffers of one model's states, within `limit_bytes`.

    Freed buffers are kept for reuse, so that a running session touches no new memory. A buffer is never clean:
    with `poison=True` (tests) each is filled with NaN when handed out.
    """

    def __init__(self, layout: StateLayout, *, limit_bytes: int | None = None, poison: bool = False) -> None:
        self.layout = layout
        self.limit_bytes = limit_bytes
        self._poison = poison
        self._sizes = {part: part_bytes(layout, part) for part in Part}  # asked for some forty times a token
        self._slabs = {part: Slabs(size) for part, size in self._sizes.items()}
        self._live: dict[Part, int] = dict.fromkeys(Part, 0)
        self.live_bytes = 0  # held by states and drafts; a shared buffer counts once
        self.accounts = Accounts()
        self.beside_bytes = 0  # what sessions hold beside their states, within the same limit
        self.on_freed: Callable[[], None] = lambda: None

    @property
    def spare_bytes(self) -> int:
        return sum(slabs.spare * self._sizes[part] for part, slabs in self._slabs.items())

    def live(self, part: Part) -> int:
        """How many buffers of that kind are held."""
        return self._live[part]

    def empty(self, namespace: str = "") -> State:
        """A state at position 0, of a namespace: what grows from it is counted there."""
        return State(0, None, PageTable(()), None, self.accounts.of(namespace))

    def draft(self, before: State, tokens: int, *, with_logits: bool) -> Draft:
        """Room for `tokens` more after `before`.

        Raises `OutOfBudget` when the pool's limit leaves no room; nothing is taken then.
        """
        page_tokens = self.layout.page_tokens
        end = before.position + tokens
        pages = list(before.table.pages)
        filled = before.position % page_tokens if pages else 0
        must_copy = filled > 0 and pages[-1].claimed != filled
        new_pages = pages_for(self.layout, end) - len(pages)
        self._require({Part.FIXED: 1, Part.LOGITS: int(with_logits), Part.PAGE: new_pages + int(must_copy)})

        copies: tuple[tuple[Buffer, Buffer, int], ...] = ()
        if must_copy:
            fresh = self.take(Part.PAGE, before.account)
            copies = ((pages[-1], fresh, filled),)
            pages[-1] = fresh
        claims = []
        if filled:
            claims.append((pages[-1], filled, min(page_tokens, filled + tokens)))
        for index in range(len(pages), len(pages) + new_pages):
            page = self.take(Part.PAGE, before.account)
            claims.append((page, 0, min(page_tokens, end - index * page_tokens)))
            pages.append(page)
        for page, _, claimed in claims:
            page.claimed = claimed

        if must_copy or new_pages:
            kept = len(before.table.pages) - int(must_copy)
            for page in pages[:kept]:
                page.retain()
            table = PageTable(tuple(pages))
        else:
            table = before.table.retain()
        fixed = self.take(Part.FIXED, before.account)
        logits = self.take(Part.LOGITS, before.account) if with_logits else None
        return Draft(before, tokens, fixed, table, logits, copies, tuple(claims))

    def take(self, part: Part, account: Account) -> Buffer:
        """One buffer with unknown content, held once; the caller has made sure of the room (`draft` does)."""
        dtype = self.layout.latent_type.dtype if part is Part.PAGE else np.dtype(np.float32)
        array = self._slabs[part].take().view(dtype)
        if self._poison:
            array.view(np.uint8).fill(0xFF)  # all bits set is NaN in float32, bfloat16 and the scales of codes
        self._live[part] += 1
        self.live_bytes += self._sizes[part]
        account.live_bytes += self._sizes[part]
        return Buffer(self, part, array, account)

    def held_bytes(self, state: State | None) -> tuple[int, int]:
        """Bytes that would become free if this holder let go of the state, and bytes that others hold too."""
        if state is None:
            return 0, 0
        whole = session_bytes(self.layout, state.position)
        if not state.is_alone:
            return 0, whole
        own = sum(self._sizes[one.part] for one in (state.fixed, state.logits) if one is not None)
        if state.table.is_alone:
            own += self._sizes[Part.PAGE] * sum(page.refs == 1 for page in state.table.pages)
        return own, whole - own

    def growth_bytes(self, position: int, tokens: int, *, stops: bool = False) -> int:
        """The most that feeding `tokens` more after a state at `position` will hold besides it, logits included.

        More than one token may be fed in several steps, each of which needs the state before it and the one after. With
        `stops` on the way there are logits of the one before, too.
        """
        pages = pages_for(self.layout, position)
        new_pages = pages_for(self.layout, position + tokens) - pages
        shared_tail = pages > 0 and position % self.layout.page_tokens != 0
        needed = {
            Part.PAGE: new_pages + int(shared_tail),
            Part.FIXED: min(tokens, 2),
            Part.LOGITS: min(tokens, 1 + int(stops)),
        }
        return self._bytes_of(needed)

    def trim(self) -> int:
        """Return the spare buffers to the operating system; gives the bytes freed."""
        return sum(slabs.trim() for slabs in self._slabs.values())

    def _require(self, needed: dict[Part, int]) -> None:
        if self.limit_bytes is not None:
            # Not the ids of what was generated since: whom memory was promised to is not to fail for a page of those.
            if (wanted := self._bytes_of(needed)) > (free := self.limit_bytes - self.live_bytes):
                raise OutOfBudget(what="the next step of a session", needed_bytes=wanted, free_bytes=free)
            new = {part: max(0, count - self._slabs[part].spare) for part, count in needed.items()}
            if self.live_bytes + self.beside_bytes + self.spare_bytes + self._bytes_of(new) > self.limit_bytes:
                self.trim()

    def _bytes_of(self, needed: dict[Part, int]) -> int:
        return sum(count * self._sizes[part] for part, count in needed.items())

    def _give_back(self, buffer: Buffer) -> None:
        self._live[buffer.part] -= 1
        self.live_bytes -= self._sizes[buffer.part]
        buffer.account.live_bytes -= self._sizes[buffer.part]
        self._slabs[buffer.part].give_back(buffer.array)
        self.on_freed()


def kda_view(layout: StateLayout, fixed: Buffer) -> NDArray[np.float32]:
    """The KDA matrices of a fixed block in panels, `[kda_layers, heads * panels, head_dim, 16]`."""
    view: NDArray[np.float32] = fixed.array[: prod(layout.kda_shape)].reshape(layout.kda_shape)
    return view


def tails_view(layout: StateLayout, fixed: Buffer) -> NDArray[np.float32]:
    """The convolution tails of a fixed block, `[kda_layers, 3, taps, heads * head_dim]`, oldest tap first."""
    view: NDArray[np.float32] = fixed.array[prod(layout.kda_shape) :].reshape(layout.conv_shape)
    return view


def page_view(layout: StateLayout, page: Buffer) -> NDArray[Any]:
    """A page as `[mla_layers, page_tokens, row_items]`."""
    return page.array.reshape(layout.mla_layers, layout.page_tokens, layout.row_items)


def snapshot_of(layout: StateLayout, state: State) -> Snapshot:
    """The state as the store's value: views, nothing copied. Keep the state retained while the snapshot is used."""
    if state.fixed is None:
        nothing = np.zeros(layout.kda_shape, dtype=np.float32), np.zeros(layout.conv_shape, dtype=np.float32)
        return Snapshot(0, layout, *nothing, (), None)
    pages = []
    for page, rows in zip(state.table.pages, layout.page_rows(state.position), strict=True):
        if rows == layout.page_tokens and page.identity is None:
            page.identity = PageIdentity()
        pages.append(
            LatentPage(page_view(layout, page)[:, :rows], page.identity if rows == layout.page_tokens else None)
        )
    logits = None if state.logits is None else state.logits.array
    kda, tails = kda_view(layout, state.fixed), tails_view(layout, state.fixed)
    return Snapshot(state.position, layout, kda, tails, tuple(pages), logits, inexact=state.inexact)


def fill(draft: Draft, layout: StateLayout, snapshot: Snapshot) -> None:
    """Copy the snapshot into a draft of as many tokens after the empty state. Touches no pool: any thread may do it."""
    if snapshot.layout != layout:
        raise ValueError(f"a snapshot of {snapshot.layout.describe()} is not one of {layout.describe()}")
    kda_view(layout, draft.fixed)[:] = snapshot.kda
    tails_view(layout, draft.fixed)[:] = snapshot.conv
    for page, stored in zip(draft.table.pages, snapshot.pages, strict=True):
        page_view(layout, page)[:, : stored.rows.shape[1]] = stored.rows
        page.identity = stored.identity
    if draft.logits is not None and snapshot.logits is not None:
        draft.logits.array[:] = snapshot.logits
