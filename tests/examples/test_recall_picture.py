"""The picture of recall shows the rows of the default precision, whole and damaged, each at its distance."""

from pathlib import Path
from typing import Any

from examples.recall_picture import draw, lines


def row(task: str, distance: int, answer: float, memory: str = "whole", reader: str = "fast") -> dict[str, Any]:
    return {
        "reader": reader, "memory": memory, "task": task, "distance_tokens": distance, "answer": answer, "chance": 0.01,
    }  # fmt: skip


ROWS = [
    row("recall", 4096, 0.8),
    row("recall", 256, 1.0),
    row("recall", 256, 0.1, memory="KDA zeroed"),
    row("corrected", 256, 0.3, memory="KDA zeroed"),
    row("recall", 256, 0.5, reader="torch"),
]


def test_one_line_a_task_and_one_a_kind_of_damage_to_recall() -> None:
    assert lines(ROWS) == {
        "a fact from the start of the notebook": [(256, 1.0), (4096, 0.8)],
        "recall, KDA state zeroed": [(256, 0.1)],
    }


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    draw({"table": ROWS}, tmp_path / "recall.png")
    assert (tmp_path / "recall.png").read_bytes().startswith(b"\x89PNG")
