"""The manifest: what ties a snapshot's parts to a node, a position, a model fingerprint and a layout."""

import math
import re
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Final, TypeVar

from serai.checkpoints.errors import FormatUnknown, SnapshotCorrupt
from serai.checkpoints.files import jsonio
from serai.checkpoints.format import HASH_BYTES, MAX_PART_BYTES, TensorSpec, safetensors_header
from serai.checkpoints.snapshot import Fingerprint, LatentType, StateLayout


class StoredAs(Enum):
    """The number type of stored values. `SAME` is lossless and the default; the others are an explicit choice.

    `INT8_ROWS` adds a float32 scale to each row: 1.25 bytes a number of a KDA state in panels, whose rows have 16.
    """

    SAME = "same"
    BFLOAT16 = "bfloat16"
    INT8_ROWS = "int8-rows"


@dataclass(frozen=True, slots=True)
class Storage:
    """The number types in which a snapshot keeps KDA state and latents; conv tails and logits are always lossless."""

    state: StoredAs = StoredAs.SAME
    latents: StoredAs = StoredAs.SAME

    @property
    def lossy(self) -> bool:
        return self != LOSSLESS


LOSSLESS: Final = Storage()

Kind = TypeVar("Kind", bound=Enum)

_HASH: Final = re.compile(f"[0-9a-f]{{{2 * HASH_BYTES}}}")  # in ASCII alone, and `fullmatch` ends at no line's end

# One file per layer of a small model would cost more in fsyncs than in bytes; K3's layers (6.7 MB) are one a part.
STATE_PART_BYTES: Final = 1 << 22


@dataclass(frozen=True, slots=True)
class Manifest:
    """One stored snapshot. `state` has a part per group of KDA layers, `pages` one per latent page; as hex hashes.

    `chain` is the node's chain: it binds the snapshot to the exact token ids it was computed from. `set_aside` says why
    it is kept for inspection but never loaded again. `inexact` is the snapshot's own, written only where it is; builds
    that don't know of it go by the node's.
    """

    node_id: str
    parent_id: str | None
    position: int
    chain: str
    reason: str
    created_s: float
    fingerprint: Fingerprint
    layout: StateLayout
    storage: Storage
    state: tuple[str, ...]
    pages: tuple[str, ...]
    logits: str | None
    set_aside: str | None = None
    inexact: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Every part's hash, duplicates included, in the order state, pages, logits."""
        return self.state + self.pages + (() if self.logits is None else (self.logits,))

    @property
    def raw_bytes(self) -> int:
        """Bytes of all parts unpacked, safetensors headers included; parts that occur twice count twice."""
        return sum(part_bytes(self))


def part_specs(manifest: Manifest) -> list[tuple[TensorSpec, ...]]:
    """The tensors of each part, in the order of `Manifest.parts`."""
    layout, storage = manifest.layout, manifest.storage
    group = layers_per_part(layout)
    specs = [state_specs(layout, storage, group)] * len(manifest.state)
    if specs:
        specs[-1] = state_specs(layout, storage, layout.kda_shape[0] - group * (len(specs) - 1))
    if manifest.pages:
        last_rows = (manifest.position - 1) % layout.page_tokens + 1
        specs += [page_specs(layout, storage, layout.page_tokens)] * (len(manifest.pages) - 1)
        specs.append(page_specs(layout, storage, last_rows))
    return specs + ([] if manifest.logits is None else [logits_specs(layout)])


def part_bytes(manifest: Manifest) -> list[int]:
    """The unpacked bytes of each part, safetensors header included, in the order of `Manifest.parts`."""
    kinds = part_specs(manifest)
    sizes = {specs: raw_bytes_of(specs) for specs in set(kinds)}
    return [sizes[specs] for specs in kinds]


def raw_bytes_of(specs: tuple[TensorSpec, ...]) -> int:
    """The unpacked bytes of a part that holds these tensors."""
    return len(safetensors_header(specs)) + sum(spec.size_bytes for spec in specs)


def layers_per_part(layout: StateLayout) -> int:
    """How many KDA layers share a part: as many as fit into `STATE_PART_BYTES` of float32, but at least one."""
    layer_bytes = 4 * (math.prod(layout.kda_shape[1:]) + math.prod(layout.conv_shape[1:]))
    return max(1, STATE_PART_BYTES // max(1, layer_bytes))


def state_parts(layout: StateLayout) -> int:
    """The number of parts that hold KDA state and conv tails."""
    return -(-layout.kda_shape[0] // layers_per_part(layout))


def state_specs(layout: StateLayout, storage: Storage, layers: int) -> tuple[TensorSpec, ...]:
    """The tensors in a part of so many KDA layers."""
    conv = TensorSpec("conv", "F32", (layers, *layout.conv_shape[1:]))
    return (*_stored(storage.state, "kda", "F32", (layers, *layout.kda_shape[1:])), conv)


def page_specs(layout: StateLayout, storage: Storage, rows: int) -> tuple[TensorSpec, ...]:
    """The tensors in the part of one page of latents."""
    same = {LatentType.FLOAT32: "F32", LatentType.BFLOAT16: "BF16", LatentType.Q8: "U8"}[layout.latent_type]
    return _stored(latents_stored_as(layout, storage), "latents", same, (layout.mla_layers, rows, layout.row_items))


def latents_stored_as(layout: StateLayout, storage: Storage) -> StoredAs:
    """The number type of stored latents; those of 8 bits are kept as they are, for no type asked for is smaller."""
    return StoredAs.SAME if layout.latent_type is LatentType.Q8 else storage.latents


def logits_specs(layout: StateLayout) -> tuple[TensorSpec, ...]:
    """The tensor in the part of the next-token logits."""
    return (TensorSpec("logits", "F32", (layout.vocab,)),)


def _stored(stored_as: StoredAs, name: str, same: str, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
    match stored_as:
        case StoredAs.SAME:
            return (TensorSpec(name, same, shape),)
        case StoredAs.BFLOAT16:
            return (TensorSpec(f"{name}_bfloat16", "BF16", shape),)
        case StoredAs.INT8_ROWS:
            return (TensorSpec(f"{name}_int8", "I8", shape), TensorSpec(f"{name}_scales", "F32", shape[:-1]))


def encode(manifest: Manifest) -> bytes:
    """The manifest's JSON."""
    layout, storage = manifest.layout, manifest.storage
    return jsonio.encode(
        {
            "node": manifest.node_id,
            "parent": manifest.parent_id,
            "position": manifest.position,
            "chain": manifest.chain,
            "reason": manifest.reason,
            "created_s": manifest.created_s,
            "fingerprint": manifest.fingerprint.as_json(),
            "layout": {
                "kda_shape": list(layout.kda_shape),
                "conv_shape": list(layout.conv_shape),
                "mla_layers": layout.mla_layers,
                "latent_width": layout.latent_width,
                "latent_type": layout.latent_type.value,
                "page_tokens": layout.page_tokens,
                "vocab": layout.vocab,
            },
            "storage": {"state": storage.state.value, "latents": storage.latents.value},
            "parts": {"state": list(manifest.state), "pages": list(manifest.pages), "logits": manifest.logits},
            **({} if manifest.set_aside is None else {"set_aside": manifest.set_aside}),
            **({"inexact": True} if manifest.inexact else {}),
        }
    )


def decode(body: bytes, what: str) -> Manifest:
    """The manifest in a document's body; `SnapshotCorrupt` or `FormatUnknown` for anything `encode` would not have
    written.
    """
    value = jsonio.decode(body, what)
    layout = _layout(jsonio.field(value, "layout", dict, what), what)
    storage = jsonio.field(value, "storage", dict, what)
    parts = jsonio.field(value, "parts", dict, what)
    if set(parts) != {"state", "pages", "logits"}:
        raise FormatUnknown(what=what, found=f"parts {sorted(parts)}", supported="the parts logits, pages and state")
    position = jsonio.count(value, "position", what)
    manifest = Manifest(
        node_id=jsonio.field(value, "node", str, what),
        parent_id=jsonio.optional_text(value, "parent", what),
        position=position,
        chain=jsonio.field(value, "chain", str, what),
        reason=jsonio.field(value, "reason", str, what),
        created_s=jsonio.field(value, "created_s", float, what),
        fingerprint=_fingerprint(jsonio.field(value, "fingerprint", dict, what), what),
        layout=layout,
        storage=Storage(_named(StoredAs, storage, "state", what), _named(StoredAs, storage, "latents", what)),
        state=_hashes(parts, "state", what),
        pages=_hashes(parts, "pages", what),
        logits=jsonio.optional_text(parts, "logits", what),
        set_aside=jsonio.field(value, "set_aside", str, what) if "set_aside" in value else None,
        inexact=jsonio.field(value, "inexact", bool, what) if "inexact" in value else False,
    )
    kinds = (
        state_specs(layout, manifest.storage, min(layers_per_part(layout), layout.kda_shape[0])),
        page_specs(layout, manifest.storage, layout.page_tokens),
        logits_specs(layout),
    )
    if any(sum(spec.size_bytes for spec in specs) > MAX_PART_BYTES for specs in kinds):
        raise SnapshotCorrupt(what=what, problem=f"its layout has parts of more than {MAX_PART_BYTES} bytes")
    # Divided, not listed: a hostile position must not make a list of its pages before it is compared with what is
    # there.
    pages = -(-position // layout.page_tokens) if layout.mla_layers else 0
    if (
        len(manifest.state) != state_parts(layout)
        or len(manifest.pages) != pages
        or (manifest.logits is None) != (position == 0)
    ):
        raise SnapshotCorrupt(what=what, problem=f"its list of parts does not fit position {position} of its layout")
    if manifest.logits is not None and not is_hash(manifest.logits):
        raise SnapshotCorrupt(what=what, problem="it names a part by something that is no hash")
    return manifest


def _layout(value: dict[str, Any], what: str) -> StateLayout:
    try:
        kda = jsonio.counts(value, "kda_shape", 4, what)
        conv = jsonio.counts(value, "conv_shape", 4, what)
        return StateLayout(
            kda_shape=(kda[0], kda[1], kda[2], kda[3]),
            conv_shape=(conv[0], conv[1], conv[2], conv[3]),
            mla_layers=jsonio.count(value, "mla_layers", what),
            latent_width=jsonio.count(value, "latent_width", what),
            latent_type=_named(LatentType, value, "latent_type", what),
            page_tokens=jsonio.count(value, "page_tokens", what),
            vocab=jsonio.count(value, "vocab", what),
        )
    except ValueError as error:
        raise SnapshotCorrupt(what=what, problem=f"its layout is impossible ({error})") from error


def _fingerprint(value: dict[str, Any], what: str) -> Fingerprint:
    known = {field.name for field in fields(Fingerprint)}
    if set(value) != known:
        raise FormatUnknown(
            what=what, found=f"fingerprint fields {sorted(set(value) ^ known)}", supported=f"the fields {sorted(known)}"
        )
    texts = {name: jsonio.field(value, name, str, what) for name in known if name != "experts_per_token"}
    return Fingerprint(experts_per_token=jsonio.count(value, "experts_per_token", what), **texts)


def _named(kinds: type[Kind], value: dict[str, Any], name: str, what: str) -> Kind:
    """The kind of that name; one that is not known is `FormatUnknown`: it is of a later version, not damaged."""
    text = jsonio.field(value, name, str, what)
    try:
        return kinds(text)
    except ValueError as error:
        raise FormatUnknown(what=what, found=f"{name} as {text!r}", supported=[kind.value for kind in kinds]) from error


def _hashes(parts: dict[str, Any], name: str, what: str) -> tuple[str, ...]:
    found = jsonio.field(parts, name, list, what)
    if not all(isinstance(item, str) and is_hash(item) for item in found):
        raise SnapshotCorrupt(what=what, problem=f"its {name} are no list of part hashes")
    return tuple(found)


def is_hash(text: str) -> bool:
    """Whether a text has the form of a hash, as every part's name has."""
    return _HASH.fullmatch(text) is not None
