"""`serai chat`: a conversation on the terminal, or line by line through pipes."""

import os
import shlex
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serai.runtime.cli.options import Budget, ExpertsPerToken, Latents, Precision, PrecisionName, Threads, Trunk
from serai.runtime.cli.output import FAILED, Output, reporting
from serai.runtime.cli.run import default_store
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

if TYPE_CHECKING:
    from serai.runtime.sampling.params import SamplingParams

NANO = "nano"
"""This model saw little thinking in its training, so it doesn't think unless told to."""


def chat(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help='"nano", a model folder, or ORG/NAME from the Hugging Face cache.')
    ] = NANO,
    resume: Annotated[
        str | None, typer.Option(metavar="ID", help="Go on with a conversation that was put away.")
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What new conversations are told to begin with.")
    ] = None,
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking",
            help="Whether to think before answering. Default: not with nano, which was trained mostly without; else "
            "what the model's family does. A conversation that is resumed goes on as it was.",
            show_default=False,
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where sessions are kept. Default: ~/.local/state/serai/sessions"),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens of one answer.")] = 1024,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    logit_bias: LogitBias = None,
    seed: Seed = None,
    min_tokens: MinTokens = 0,
    precision: Precision = PrecisionName.FAST,
    trunk: Trunk = None,
    latents: Latents = None,
    experts_per_token: ExpertsPerToken = None,
    budget: Budget = None,
    threads: Threads = None,
) -> None:
    """Talk with a model, with conversations that fork, pause and resume; /help lists the commands.

    Each line of input is a message. Ctrl-C stops an answer; twice, it pauses and prints the command to resume, and so
    do /quit and the end of input. What is not the answer itself, such as thinking, is on lines that begin with "| ".
    """
    with reporting(as_json=False) as out:
        import anyio

        from serai.runtime.cli.interrupts import leave_at_once, leaving_at_once
        from serai.runtime.errors import BadParameter
        from serai.runtime.sampling.params import SamplingParams

        if system is not None and resume is not None:
            raise BadParameter("--system is for new conversations, and --resume goes on with one; give one of the two")
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
            min_tokens=min_tokens,
        )
        job = _Job(
            model,
            resume,
            system,
            thinking,
            store or default_store(os.environ),
            params,
            precision,
            trunk,
            latents,
            experts_per_token,
            budget,
            threads,
            out,
        )
        with leaving_at_once("interrupted before anything was read, so there is nothing new to resume"):
            done = anyio.run(job.work)
        if done.signal is not None:
            leave_at_once(done.signal)  # a thread may still wait for a line, and nothing ends that
        if done.failed and not sys.stdin.isatty():
            raise typer.Exit(FAILED)  # a person has seen it; a script has only this


@dataclass(frozen=True, slots=True)
class _Done:
    """How a chat ended: by a signal, if any, and whether anything that was asked for failed."""

    signal: int | None
    failed: bool


@dataclass(frozen=True, slots=True)
class _Job:
    """One run of the command."""

    model: str
    resume: str | None
    system: str | None
    thinking: bool | None
    store: Path
    params: "SamplingParams"
    precision: PrecisionName
    trunk: str | None
    latents: str | None
    experts_per_token: int | None
    budget: str | None
    threads: int | None
    out: Output

    async def work(self) -> _Done:
        """Open the model, talk until the end, and put everything away."""
        from serai.runtime.cli.chat_interrupts import ChatInterrupts
        from serai.runtime.cli.chat_loop import ChatLoop, ChatOptions
        from serai.runtime.cli.opening import opening_progress
        from serai.runtime.opening import open_runtime

        options = ChatOptions(
            store=self.store,
            system=self.system,
            begin_thinking=False if self.thinking is None and self.model == NANO else self.thinking,
            thinking=self.thinking,
            params=self.params,
            command=self.command_to_resume,
        )
        with ExitStack() as shown:
            tell = shown.enter_context(opening_progress())
            async with open_runtime(
                self.model,
                budget=self.budget,
                store=self.store,
                precision=self.precision.value,
                trunk=self.trunk,
                latents=self.latents,
                experts_per_token=self.experts_per_token,
                threads=self.threads,
                progress=lambda opening: tell(opening.stage, opening.done, opening.total),
            ) as runtime:
                shown.close()
                interrupts = ChatInterrupts(lambda: self.out.note("\nCtrl-C again pauses and leaves"))
                async with interrupts.watched():
                    if sys.stdin.isatty():
                        self.out.note(f"{self.model}, {self.precision.value}; /help lists the commands")
                    loop = ChatLoop(runtime, options, next_line, interrupts, self.out.note)
                    with interrupts.leave:
                        await loop.run(self.resume)
                    if sys.stdin.isatty():
                        self.out.note("")  # the prompt's line is still open
                    await loop.put_away()
        return _Done(interrupts.signal, loop.failed)

    def command_to_resume(self, session_id: str) -> str:
        """What to type to go on, with the same model, store, precision and budget."""
        words = ["serai", "chat", self.model, "--resume", session_id]
        if self.store != default_store(os.environ):
            words += ["--store", str(self.store)]
        if self.precision is not PrecisionName.FAST:
            words += ["--precision", self.precision.value]
        if self.trunk is not None:
            words += ["--trunk", self.trunk]
        if self.latents is not None:
            words += ["--latents", self.latents]
        if self.experts_per_token is not None:
            words += ["--experts-per-token", str(self.experts_per_token)]
        if self.budget is not None:
            words += ["--budget", self.budget]
        return shlex.join(words)


async def next_line() -> str | None:
    """The next line of stdin, or None at its end; bytes that are not UTF-8 are read as U+FFFD."""
    import anyio.to_thread

    if sys.stdin.isatty():
        typer.echo("> ", nl=False, err=True)
    line = await anyio.to_thread.run_sync(sys.stdin.buffer.readline, abandon_on_cancel=True)
    return line.decode("utf-8", "replace") if line else None
