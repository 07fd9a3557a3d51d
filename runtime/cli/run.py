"""`serai run`: a prompt in, text out, and a session that can be taken up again."""

import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serai.runtime.cli.monitor import check_terminal
from serai.runtime.cli.options import (
    Budget,
    ExpertsPerToken,
    Json,
    Latents,
    Model,
    Precision,
    PrecisionName,
    Threads,
    Trace,
    Trunk,
    WarmStart,
)
from serai.runtime.cli.output import Output, reporting
from serai.runtime.cli.sampling_options import (
    FrequencyPenalty,
    LogitBias,
    MinP,
    MinTokens,
    PresencePenalty,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
    logit_biases,
)
from serai.runtime.cli.status_line import StatusLine

if TYPE_CHECKING:
    from serai.runtime.monitor.embedded import Screen
    from serai.runtime.runtime import Runtime
    from serai.runtime.sampling.params import SamplingParams
    from serai.runtime.sessions.generation import Token
    from serai.runtime.sessions.journal import Point
    from serai.runtime.sessions.session import Session


def run(
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help='Text to read; "-", or none for a new session, reads stdin.'),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="ID", help="Go on from a point that was printed before.")
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where sessions are kept. \\[default: ~/.local/state/serai/sessions]"),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens to generate.")] = 256,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    logit_bias: LogitBias = None,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeat for several.")] = None,
    min_tokens: MinTokens = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's own stop tokens.")] = False,
    show_monitor: Annotated[
        bool, typer.Option("--monitor", help="Show the session monitor meanwhile; the text is printed when it is left.")
    ] = False,
    precision: Precision = PrecisionName.FAST,
    trunk: Trunk = None,
    latents: Latents = None,
    experts_per_token: ExpertsPerToken = None,
    budget: Budget = None,
    threads: Threads = None,
    warm_start: WarmStart = False,
    trace: Trace = None,
    as_json: Json = False,
) -> None:
    """Read a prompt and stream the answer. Ctrl-C pauses and prints the id to resume; so does the end of the answer."""
    with reporting(as_json=as_json) as out:
        import anyio

        from serai.runtime.cli.interrupts import exit_code, leaving_at_once
        from serai.runtime.sampling.params import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_biases(logit_bias or ()),
            seed=seed,
            stop=tuple(stop or ()),
            min_tokens=min_tokens,
            ignore_eos=ignore_eos,
        )
        text = _prompt(prompt, resume)
        if show_monitor:
            check_terminal("leave --monitor out")
        kept = store or default_store(os.environ)
        job = _Job(
            model,
            text,
            resume,
            kept,
            params,
            precision.value,
            trunk,
            latents,
            experts_per_token,
            budget,
            threads,
            warm_start,
            trace,
            show_monitor,
            out,
        )
        with leaving_at_once("interrupted before anything was read, so there is nothing new to resume"):
            done = anyio.run(job.work)
        _report(out, job, done)
        if done.signal is not None:
            raise typer.Exit(exit_code(done.signal))


def default_store(environ: Mapping[str, str]) -> Path:
    """Where sessions are kept when `--store` doesn't say: below `$XDG_STATE_HOME`, else below `~/.local/state`."""
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "serai" / "sessions"


@dataclass(slots=True)
class _Done:
    """What came of a run, so far."""

    session_id: str = ""
    point: "Point | None" = None
    position: int = 0
    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    signal: int | None = None
    open_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    printed: int = 0
    screen: "Screen | None" = None

    @property
    def is_covered(self) -> bool:
        """Whether the terminal is the monitor's now."""
        return self.screen is not None and self.screen.is_shown


@dataclass(frozen=True, slots=True)
class _Job:
    """One run of the command."""

    model: str
    prompt: str | None
    resume: str | None
    store: Path
    params: "SamplingParams"
    precision: str
    trunk: str | None
    latents: str | None
    experts_per_token: int | None
    budget: str | None
    threads: int | None
    warm_start: bool
    trace: Path | None
    monitored: bool
    out: Output

    async def work(self) -> _Done:
        """Open the model, let the session go on, and put it away again."""
        from serai.runtime.cli.interrupts import interruptible
        from serai.runtime.cli.opening import opening_progress
        from serai.runtime.opening import open_runtime

        done = _Done()
        began_s = time.monotonic()
        with ExitStack() as shown:
            tell = shown.enter_context(opening_progress())
            async with open_runtime(
                self.model,
                budget=self.budget,
                store=self.store,
                precision=self.precision,
                trunk=self.trunk,
                latents=self.latents,
                experts_per_token=self.experts_per_token,
                threads=self.threads,
                warm_start=self.warm_start,
                trace=self.trace,
                progress=lambda opening: tell(opening.stage, opening.done, opening.total),
            ) as runtime:
                shown.close()
                done.open_s = time.monotonic() - began_s
                async with interruptible() as interrupt:
                    session = await self._session(runtime)
                    done.session_id = session.id
                    alone = self.out.as_json or not sys.stdout.isatty()
                    try:
                        with StatusLine(sys.stderr, alone=alone) as status:  # before a monitor takes stderr
                            async with self._monitor(runtime, session, done):
                                with interrupt.stops:
                                    await self._go_on(session, done, status)
                    finally:
                        self._print_rest(done)
                        if done.text and not self.out.as_json:
                            typer.echo()  # the text may have ended anywhere in a line
                    done.signal = interrupt.signal
                    done.position = session.position
                    if session.position:
                        done.point = await session.pause()
        return done

    def command_to_resume(self, point_id: str) -> str:
        """What to type to go on, in the same store, precision and other options that make a state what it is."""
        words = ["serai", "run", self.model, "--resume", point_id]
        if self.store != default_store(os.environ):
            words += ["--store", str(self.store)]
        if self.precision != PrecisionName.FAST.value:
            words += ["--precision", self.precision]
        if self.trunk is not None:
            words += ["--trunk", self.trunk]
        if self.latents is not None:
            words += ["--latents", self.latents]
        if self.experts_per_token is not None:
            words += ["--experts-per-token", str(self.experts_per_token)]
        return shlex.join(words)

    async def _session(self, runtime: "Runtime") -> "Session":
        if self.resume is not None:
            return await runtime.resume(self.resume)
        return await runtime.session(label="serai run")

    @asynccontextmanager
    async def _monitor(self, runtime: "Runtime", session: "Session", done: _Done) -> AsyncIterator[None]:
        """Show the session in the monitor while the block runs, if that is wanted."""
        if not self.monitored:
            yield
            return
        import anyio

        from serai.runtime.monitor.embedded import Screen
        from serai.runtime.monitor.in_process import InProcess

        done.screen = screen = Screen()
        source = InProcess(runtime, store=runtime.store)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(screen.show, source, left=lambda: self._print_rest(done), session_id=session.id))
            try:
                yield
            finally:
                await screen.end()

    def _print_rest(self, done: _Done) -> None:
        """Print what came while the terminal was the monitor's."""
        if not self.out.as_json:
            _echo("".join(done.text[done.printed :]))
        done.printed = len(done.text)

    async def _go_on(self, session: "Session", done: _Done, status: StatusLine) -> None:
        """Read the prompt, if there is one, and stream the answer; `done` is right at every moment."""
        began_s = time.monotonic()
        if self.prompt is not None:
            done.prompt_tokens = (await session.append(self.prompt)).tokens
        done.prefill_s = time.monotonic() - began_s
        began_s = time.monotonic()
        async with session.generate(self.params) as generation:
            async for token in generation:
                self._take(token, done)
                done.decode_s = time.monotonic() - began_s
                if not done.is_covered:
                    status.show(_speed(done))

    def _take(self, token: "Token", done: _Done) -> None:
        done.tokens.append(token.id)
        done.text.append(token.text)
        done.finish_reason = None if token.finish_reason is None else token.finish_reason.value
        if not done.is_covered:
            self._print_rest(done)


def _report(out: Output, job: _Job, done: _Done) -> None:
    if out.as_json:
        out.result(
            {
                "model": job.model,
                "precision": job.precision,
                "session": done.session_id,
                "resume": None if done.point is None else done.point.id,
                "position": done.position,
                "prompt_tokens": done.prompt_tokens,
                "tokens": done.tokens,
                "text": "".join(done.text),
                "finish_reason": "interrupted" if done.signal is not None else done.finish_reason,
                "open_s": done.open_s,
                "prefill_s": done.prefill_s,
                "decode_s": done.decode_s,
                "stored_bytes": 0 if done.point is None else done.point.written_bytes,
            }
        )
    if done.point is None:
        out.note("nothing was read, so there is nothing to resume")
        return
    out.note(f"{_speed(done)}; paused at {done.position:,} tokens, {done.point.written_bytes:,} bytes written")
    out.note(f"go on with: {job.command_to_resume(done.point.id)}")


def _speed(done: _Done) -> str:
    rate = len(done.tokens) / done.decode_s if done.decode_s else 0.0
    return f"{len(done.tokens):,} tokens, {rate:.1f} tok/s"


def _prompt(prompt: str | None, resume: str | None) -> str | None:
    """The text to read: as given, or stdin's; None when a session is only to be continued."""
    from serai.runtime.errors import BadParameter

    if prompt is None and resume is not None:
        return None
    text = sys.stdin.read() if prompt is None or prompt == "-" else prompt
    if not text:
        raise BadParameter("the prompt is empty; give some text as an argument or on stdin")
    return text


def _echo(text: str) -> None:
    if text:
        typer.echo(_printable(text) if sys.stdout.isatty() else text, nl=False)


def _printable(text: str) -> str:
    """The text without the control characters by which it could take over a terminal; line ends and tabs stay."""
    return "".join(char for char in text if char in "\n\t" or (char >= " " and not "\x7f" <= char <= "\x9f"))
