"""Take pictures of the session monitor: the real program in a terminal (tmux), watching a live server.

python examples/monitor_picture.py [FOLDER]

It starts `serai serve nano`, gives it a notebook to read and a few questions in forks, opens `serai monitor` in tmux,
presses keys as a person would, and draws what is on the screen as SVG: blocks and rules as shapes, so that they look
the same wherever the file is shown. Needs tmux, and the extras `server` and `monitor`.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from xml.sax.saxutils import escape

import httpx
from rich.cells import cell_len
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

FOLDER = Path(__file__).parent / "pictures"
WIDTH, HEIGHT = 120, 32
PATIENCE_S = 120.0

NOTEBOOK = (
    "The code of the red box is 4172. The home of Mira is Lisbon. The owner of the grey bag is Emma. "
    "The job of Tina is doctor. The code of the green box is 9038. The friend of Flora is Harold. "
)
QUESTIONS = {
    "boxes": "What is the code of the red box?",
    "people": "What is the job of Tina?",
    "homes": "What is the home of Mira?",
    "bags": "What is the owner of the grey bag?",
    "friends": "What is the friend of Flora?",
}
BUSY = ("people", "bags", "friends")
"""Forks that are kept talking while the picture is taken."""


@contextmanager
def served(folder: Path) -> Iterator[httpx.Client]:
    """A server on a Unix socket in the folder, once it answers."""
    command = [sys.executable, "-m", "serai.runtime", "serve", "nano", "--host", f"unix:{folder / 'serai.sock'}"]
    with ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("wb"))
        arguments = ["--store", str(folder / "sessions"), "--budget", "1GiB"]
        server = stack.enter_context(subprocess.Popen([*command, *arguments], stderr=log))
        stack.callback(server.terminate)
        transport = httpx.HTTPTransport(uds=str(folder / "serai.sock"))
        client = stack.enter_context(httpx.Client(base_url="http://serai", transport=transport, timeout=PATIENCE_S))

        def answers() -> bool:
            try:
                return client.get("/health").is_success
            except httpx.TransportError:
                return False

        wait_until(answers)
        yield client


def ask(client: httpx.Client, text: str, previous: str | None = None, **more: object) -> str:
    """The id of the response."""
    body = {"model": "nano", "input": text, "previous_response_id": previous, "temperature": 0.6, **more}
    answer = client.post("/v1/responses", json={name: value for name, value in body.items() if value is not None})
    return str(answer.raise_for_status().json()["id"])


def label(client: httpx.Client, known: set[str], name: str) -> None:
    """Call the sessions that were not there before by a name."""
    for one in client.get("/serai/status").json()["sessions"]:
        if one["id"] not in known:
            known.add(one["id"])
            client.post("/serai/actions", json={"action": "label", "session": one["id"], "value": name})


def talk(client: httpx.Client, stack: ExitStack) -> None:
    """A reader of notebooks with forks that ask it things; some of them go on for long."""
    known: set[str] = set()
    first = ask(client, NOTEBOOK)
    label(client, known, "reader")
    for name, question in QUESTIONS.items():
        response = ask(client, question, first)
        label(client, known, name)
        if name not in BUSY:
            continue
        more = {"min_tokens": 30_000, "max_output_tokens": 30_000, "ignore_eos": True}
        threading.Thread(target=_go_on, args=(client, response, more), daemon=True).start()
        time.sleep(0.5)
        label(client, known, f"{name}, at length")


def _go_on(client: httpx.Client, response: str, more: dict[str, object]) -> None:
    try:
        ask(client, "Hello. What is the code of the green box?", response, **more)
    except httpx.HTTPError:
        return  # the server is ended with the pictures


class Terminal:
    """A tmux session of its own server, of a fixed size."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self._tmux = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        environ = os.environ | {"COLORTERM": "truecolor", "TERM": "xterm-256color"}
        start = [*self._tmux, "new-session", "-d", "-x", str(WIDTH), "-y", str(HEIGHT), "-e", "COLORTERM=truecolor"]
        subprocess.run([*start, *command], check=True, env=environ)
        subprocess.run([*self._tmux, "set", "status", "off"], check=True)

    def keys(self, *names: str) -> None:
        for name in names:
            subprocess.run([*self._tmux, "send-keys", name], check=True)
            time.sleep(0.3)

    def screen(self) -> list[str]:
        """The lines on the screen, with their colours as escape sequences."""
        shown = subprocess.run([*self._tmux, "capture-pane", "-e", "-p"], check=True, capture_output=True)
        return shown.stdout.decode().split("\n")[:HEIGHT]

    def wait_for(self, text: str) -> None:
        wait_until(lambda: any(text in Text.from_ansi(one).plain for one in self.screen()))

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False)


def wait_until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > end_s:
            raise SystemExit("it took too long; is the machine busy?")
        time.sleep(0.1)


# What follows draws a screen.

CELL_W, CELL_H, FONT_PX = 8.0, 17.0, 13.3
BAR_H = 30.0
FOREGROUND, BACKGROUND = "#e0e0e0", "#121212"
_DOTS = ("#ff5f57", "#febc2e", "#28c840")
_LOWER = "▁▂▃▄▅▆▇█"
_CONSOLE = Console(color_system="truecolor")
_SHADES = {"░": 0.3, "▒": 0.55, "▓": 0.8}
_RULES = {"│": "ud", "─": "lr", "├": "udr", "└": "ur", "┌": "dr", "╭": "dr", "╰": "ur"}


def svg(lines: list[str], title: str) -> str:
    """A screen in a window."""
    width, height = WIDTH * CELL_W + 20, HEIGHT * CELL_H + BAR_H + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">',
        f"<style>text{{font:{FONT_PX}px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;white-space:pre}}"
        ".b{font-weight:bold}.u{text-decoration:underline}</style>",
        f'<rect width="{width:g}" height="{height:g}" rx="9" fill="{BACKGROUND}" stroke="#3a3a3a"/>',
        *(
            f'<circle cx="{18 + 18 * n}" cy="16" r="5.5" fill="{c}"/>'
            for n, c in enumerate(("#ff5f57", "#febc2e", "#28c840"))
        ),
        f'<text x="{width / 2:g}" y="20" text-anchor="middle" fill="#9a9a9a">{escape(title)}</text>',
    ]
    for row, text in enumerate(lines):
        column = 0
        decoded = Text.from_ansi(text, end="")
        for segment in decoded.render(_CONSOLE):
            parts.extend(_run(segment.text, segment.style or Style.null(), column, row))
            column += cell_len(segment.text)
    return "\n".join((*parts, "</svg>\n"))


def _run(text: str, style: Style, column: int, row: int) -> Iterator[str]:
    """Characters of one style: their ground, then shapes, then what is left as text."""
    ink, ground = _hex(style.color, FOREGROUND), _hex(style.bgcolor, BACKGROUND)
    if style.reverse:
        ink, ground = ground, ink
    x, y = 10 + column * CELL_W, BAR_H + row * CELL_H
    cells = cell_len(text)
    if ground != BACKGROUND and cells:
        yield f'<rect x="{x:g}" y="{y:g}" width="{cells * CELL_W:g}" height="{CELL_H:g}" fill="{ground}"/>'
    plain, start = "", x
    for char in (*text, ""):
        size = cell_len(char) * CELL_W
        shape = _shape(char, x, y, ink)
        if char and char != " " and not shape:
            plain, start = plain + char, start if plain else x
        elif char == " " and plain and not plain.endswith("  "):
            plain += char
        elif plain:
            yield _text(plain.rstrip(), start, y, ink, style)
            plain = ""
        if shape:
            if plain:
                yield _text(plain.rstrip(), start, y, ink, style)
                plain = ""
            yield shape
        x += size


def _text(text: str, x: float, y: float, ink: str, style: Style) -> str:
    names = " ".join(name for name, on in (("b", style.bold), ("u", style.underline)) if on)
    kind = f' class="{names}"' if names else ""
    length = f' textLength="{cell_len(text) * CELL_W:g}" lengthAdjust="spacingAndGlyphs"'
    return f'<text x="{x:g}" y="{y + CELL_H * 0.76:g}" fill="{ink}"{kind}{length}>{escape(text)}</text>'


def _shape(char: str, x: float, y: float, ink: str) -> str:
    """Blocks, shades and rules as rectangles; nothing for any other character."""
    if char and char in _LOWER:
        high = CELL_H * (_LOWER.index(char) + 1) / 8
        return f'<rect x="{x:g}" y="{y + CELL_H - high:g}" width="{CELL_W:g}" height="{high:g}" fill="{ink}"/>'
    if char in _SHADES:
        return (
            f'<rect x="{x:g}" y="{y:g}" width="{CELL_W:g}" height="{CELL_H:g}" fill="{ink}" opacity="{_SHADES[char]}"/>'
        )
    if char in _RULES:
        middle_x, middle_y = x + CELL_W / 2, y + CELL_H / 2
        ends = {"u": f"V{y:g}", "d": f"V{y + CELL_H:g}", "l": f"H{x:g}", "r": f"H{x + CELL_W:g}"}
        path = "".join(f"M{middle_x:g} {middle_y:g}{ends[way]}" for way in _RULES[char])
        return f'<path d="{path}" stroke="{ink}"/>'
    return ""


def _hex(color: Color | None, default: str) -> str:
    return default if color is None or color.is_default else color.get_truecolor().hex


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        room = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serai-")))
        client = stack.enter_context(served(room))
        talk(client, stack)
        where = f"unix:{room / 'serai.sock'}"
        terminal = Terminal(room, [sys.executable, "-m", "serai.runtime", "monitor", where])
        stack.callback(terminal.close)
        terminal.wait_for("live")
        terminal.keys("Down", "Down", "p", "y")
        terminal.wait_for("resumable")
        time.sleep(12)  # let the sparklines grow
        shown = {"monitor": terminal.screen()}
        terminal.keys("Down", "Down", "Enter")
        terminal.wait_for("answer")
        time.sleep(3)
        shown["monitor_detail"] = terminal.screen()
        for name, lines in shown.items():
            file = folder / f"{name}.svg"
            file.write_text(svg(lines, "serai monitor"), encoding="utf-8")
            print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
