"""Draw the screens that the tests compare with: python -m tests.runtime.monitor.draw_screens."""

import anyio

from tests.runtime.monitor.test_app import SCREENS, SIZES, VIEW_KEYS, draw


async def draw_all() -> None:
    for view in VIEW_KEYS:
        for name, size in SIZES.items():
            text = await draw(view, size)
            await anyio.Path(SCREENS / f"{view}-{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    SCREENS.mkdir(exist_ok=True)
    anyio.run(draw_all)
