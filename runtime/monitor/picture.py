"""Pictures for reports: a tree of sessions and a budget, as SVG.

Plain SVG 1.1, no scripts, no fonts or files from elsewhere; readable on white and on dark paper. Text from strangers is
made printable first (XML has no place for control characters at all) and then escaped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from serai.runtime.cli.output import bytes_text
from serai.runtime.monitor.budget_page import shares
from serai.runtime.monitor.text import Tone, fit
from serai.runtime.monitor.tree import rows
from serai.runtime.status import BudgetStatus, SessionStatus

ROW_PX = 26
INDENT_PX = 22
CHAR_PX = 7.3
"""The width of a character of the 12 px monospaced font, generously."""
LABEL_CELLS = 40

FILLS = {
    Tone.TRUNK: "#4e79a7",
    Tone.SCRATCH: "#9c755f",
    Tone.EXPERTS: "#8f6bb0",
    Tone.LIVE: "#3f8f3f",
    Tone.KEPT: "#b8860b",
    Tone.SPARE: "#5f6b6d",
    Tone.FREE: "#e8e8e8",
}
_CSS = "text{font:12px ui-monospace,monospace;fill:#222222}.dim{fill:#666666}.head{font-weight:bold}"
_TIER_FILLS = {"hot": "#3f8f3f", "cold": "#4e79a7", "paused": "#b8860b"}


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A box of a tree. `parent` is the id of another; one that isn't in the picture makes a root. `tier` is "hot",
    "cold", "paused" or anything else."""

    id: str
    parent: str | None
    label: str
    detail: str
    tier: str


def session_nodes(sessions: Sequence[SessionStatus]) -> list[TreeNode]:
    """The live sessions as nodes, in the order in which the monitor shows them."""
    return [
        TreeNode(
            one.id,
            one.parent,
            one.label or one.id[:8],
            f"{one.tier}, {one.position:,} tokens, {bytes_text(one.own_bytes)} own",
            one.tier,
        )
        for one in (row.status for row in rows(sessions))
    ]


def depths(nodes: Sequence[TreeNode]) -> list[int]:
    """How deep each node stands: 0 for one whose parent comes later or not at all."""
    depth: dict[str, int] = {}
    for node in nodes:
        depth[node.id] = depth[node.parent] + 1 if node.parent in depth else 0
    return [depth[node.id] for node in nodes]


def tree_svg(nodes: Sequence[TreeNode], *, title: str) -> str:
    """A tree, one line a node, children below and right of their parent; parents must come before their children.

    A node whose parent comes later or not at all stands at the left.
    """
    levels = depths(nodes)
    line_of: dict[str, int] = {}
    parts: list[str] = []
    for number, (node, level) in enumerate(zip(nodes, levels, strict=True)):
        line_of[node.id] = number
        x, y = 16 + level * INDENT_PX, 56 + number * ROW_PX
        if node.parent is not None and level:
            start = 56 + line_of[node.parent] * ROW_PX
            parts.append(f'<path d="M{x - INDENT_PX} {start + 6}V{y}H{x - 6}" fill="none" stroke="#888888"/>')
        fill = _TIER_FILLS.get(node.tier, "#888888")
        parts.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{fill}"><title>{_text(node.id, 64)}</title></circle>')
        parts.append(f'<text x="{x + 12}" y="{y + 4}">{_text(node.label, LABEL_CELLS)}')
        parts.append(f'<tspan dx="10" class="dim">{_text(node.detail, 60)}</tspan></text>')
    deepest = max(levels, default=0)
    width = 40 + deepest * INDENT_PX + (LABEL_CELLS + 44) * CHAR_PX
    return _document(width, 72 + len(nodes) * ROW_PX, title, parts)


def budget_svg(budget: BudgetStatus, *, title: str) -> str:
    """The budget as one bar with a legend; what is over the budget is written beneath."""
    width, left = 760.0, 16.0
    parts: list[str] = []
    drawn = shares(budget)
    total = max(sum(share.amount for share in drawn), 1)
    x = left
    for number, share in enumerate(drawn):
        size = (width - 2 * left) * max(share.amount, 0) / total
        if size:
            name = _text(f"{share.name}: {bytes_text(share.amount)}", 60)
            parts.append(
                f'<rect x="{x:.1f}" y="44" width="{size:.1f}" height="34" fill="{FILLS[share.tone]}" '
                f'stroke="#ffffff"><title>{name}</title></rect>'
            )
        if size > len(share.name) * CHAR_PX + 8:
            ink = "#222222" if share.tone is Tone.FREE else "#ffffff"
            parts.append(f'<text x="{x + 5:.1f}" y="65" style="fill:{ink}">{_text(share.name, 20)}</text>')
        x += size
        row, column = divmod(number, 3)
        at_x, at_y = left + column * 245, 108 + row * 24
        parts.append(f'<rect x="{at_x}" y="{at_y - 10}" width="12" height="12" fill="{FILLS[share.tone]}"/>')
        parts.append(f'<text x="{at_x + 20}" y="{at_y}">{_text(share.name, 20)} {bytes_text(share.amount)}</text>')
    over = -budget.free_bytes
    told = f"budget {bytes_text(budget.budget_bytes)}" + (f", over by {bytes_text(over)}" if over > 0 else "")
    parts.append(f'<text x="{left}" y="188" class="dim">{told}</text>')
    return _document(width, 204, title, parts)


def _document(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    shown = _text(title, 90)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label={quoteattr(fit(title, 90).strip())}>',
            f"<style>{_CSS}</style>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            f'<text x="16" y="26" class="head">{shown}</text>',
            *parts,
            "</svg>\n",
        )
    )


def _text(text: str, cells: int) -> str:
    return escape(fit(text, cells).rstrip())
