"""Take a picture of the session monitor: the real program, drawn without a terminal.

python examples/monitor_picture.py [URL or SOCKET] [FILE.svg]

Without an address it watches the simulation of `serai monitor --demo`, which looks the same every time.
"""

import asyncio
import sys
from pathlib import Path

from serai.runtime.monitor.app import Monitor
from serai.runtime.monitor.demo import Demo
from serai.runtime.monitor.http_source import HttpSource

FILE = Path(__file__).parent / "pictures" / "monitor.svg"
SIZE = (112, 24)
LOOKS = 40


async def picture(target: str | None) -> str:
    """The sessions' view after a few looks, as SVG."""
    app = Monitor(Demo() if target is None else HttpSource(target), every_s=None, clock=lambda: "12:00:00")
    async with app.run_test(size=SIZE) as pilot:
        for _ in range(LOOKS):
            await app.poll()
        await pilot.press("down", "down")
        await pilot.pause()
        return app.export_screenshot(title="serai monitor")


def main() -> None:
    names = [Path(name) for name in sys.argv[1:] if name.endswith(".svg")]
    targets = [name for name in sys.argv[1:] if not name.endswith(".svg")]
    drawn = asyncio.run(picture(targets[0] if targets else None))
    file = names[0] if names else FILE
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(line.rstrip() for line in drawn.splitlines()) + "\n", encoding="utf-8")
    print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
