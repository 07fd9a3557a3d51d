"""Draw what `serai bench recall` measured, as the picture in README.

serai bench recall --json > recall.json
python examples/recall_picture.py recall.json examples/pictures/recall.png     # needs matplotlib
"""

import json
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

TASKS = {
    "recall": "a fact from the start of the notebook",
    "corrected": "a fact that was corrected afterwards",
    "correction_kept": "a correction from before the notebook",
    "untouched": "a fact beside one that was corrected",
    "absent": "never told: says so",
    "count": "how many things are on a list",
}
DAMAGE = {
    "KDA zeroed": "recall, KDA state zeroed",
    "KDA zeroed before the question": "recall, KDA state zeroed before the question",
    "latents dropped": "recall, latents dropped",
}
READER = "fast"
"""The default precision, whose figures README states."""


def lines(rows: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Label -> points (distance in tokens, share of whole answers right), for the undamaged and the damaged states."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["reader"] != READER:
            continue
        if row["memory"] == "whole":
            label = TASKS[row["task"]]
        elif row["task"] == "recall":
            label = DAMAGE[row["memory"]]
        else:
            continue
        found.setdefault(label, []).append((row["distance_tokens"], row["answer"]))
    return {label: sorted(points) for label, points in found.items()}


def draw(report: dict[str, Any], to: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    marks = cycle("osD^vP*X")
    distances: set[int] = set()
    for label, points in lines(report["table"]).items():
        damaged = label in DAMAGE.values()
        axes.plot(*zip(*points, strict=True), marker=next(marks), label=label, linestyle=":" if damaged else "-")
        distances.update(distance for distance, _ in points)
    chance = max(row["chance"] for row in report["table"] if row["task"] == "recall")
    axes.axhline(chance, color="grey", linewidth=0.8, linestyle="--", label=f"guessing, recall: {chance:.2f} at most")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(distances), [f"{distance:,}" for distance in sorted(distances)])
    axes.minorticks_off()
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("tokens between what was told and the answer")
    axes.set_ylabel("whole answers right")
    axes.set_title(f"serai nano, {READER} precision, held-out conversations", loc="left", fontsize="medium")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", frameon=False, fontsize="small")
    figure.savefig(to, dpi=150)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
