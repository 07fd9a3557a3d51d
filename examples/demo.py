"""What `make demo` runs: a session reads a notebook, is forked, corrected and paused; a new process resumes it.

python examples/demo.py [MODEL]
"""

import asyncio
import hashlib
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

from serai.runtime import Chat, Runtime, SamplingParams, open_runtime
from serai.runtime.bench import recall_facts
from serai.runtime.opening import Opening

FOLDER = Path(".demo")
BUDGET = "1GiB"
GREEDY = SamplingParams(temperature=0, max_tokens=60)
NOTEBOOK_TOKENS = 2_000

FACTS = {
    "What is the code of the red box?": ("The code of the red box is 4172.", "4172"),
    "What is the home of Paula?": ("The home of Paula is Naples.", "Naples"),
    "What is the place of the blue lamp?": ("The place of the blue lamp is the cellar.", "the cellar"),
}
CORRECTED = "What is the code of the red box?"
CORRECTION = "Correction: the code of the red box is 9035, not 4172."
NEW_VALUE = "9035"


def notebook(rt: Runtime) -> str:
    """The three facts, far apart, among a hundred others and everyday sentences; about NOTEBOOK_TOKENS long."""
    rng = random.Random(7)
    taken = {("code", "the red box"), ("home", "Paula"), ("place", "the blue lamp")}
    sentences: list[str] = []
    length = 0
    while length < NOTEBOOK_TOKENS:
        other = rng.random() < 0.5
        sentences.append(recall_facts.random_fact(rng, taken).statement() if other else recall_facts.filler(rng))
        length += len(rt.tokenizer.encode(" " + sentences[-1])) if rt.tokenizer else 10
    for place, (sentence, _) in zip((0.1, 0.4, 0.6), FACTS.values(), strict=True):
        sentences.insert(int(place * len(sentences)), sentence)
    return " ".join(sentences)


async def ask(chat: Chat, question: str) -> str:
    return (await chat.send(question, GREEDY).collect()).message.text


async def fingerprint(chat: Chat) -> str:
    """What tells two states apart: the bits of the next-token logits, and the token ids."""
    digest = hashlib.sha256((await chat.session.logits()).tobytes())
    digest.update(chat.session.tokens().tobytes())
    return digest.hexdigest()


def show(question: str, answer: str, expected: str) -> None:
    print(f"   {question:42} {answer:44} {'✓' if expected in answer else '✗'}")


def told(step: Opening) -> None:
    """One line that counts up while kernels are compiled, which happens once on a machine."""
    if step.stage == "kernels":
        print(
            f"\r   preparing kernels: {step.done} of {step.total}",
            end="\n" if step.done == step.total else "",
            flush=True,
        )


async def first(model: str) -> None:
    """Read, fork, ask, correct, pause."""
    started = time.perf_counter()
    async with open_runtime(model, budget=BUDGET, store=FOLDER / "sessions", progress=told) as rt:
        print(f"1. opened {rt.facts.name} in {time.perf_counter() - started:.1f} s")
        reader = await rt.chat(thinking=False, label="reader")
        started = time.perf_counter()
        await reader.send(notebook(rt), GREEDY).collect()
        took = time.perf_counter() - started
        print(f"2. read a notebook: {reader.session.position} tokens, {reader.session.position / took:,.0f} a second")

        before = rt.status().budget.live_bytes
        started = time.perf_counter()
        forks = await reader.fork_many(3)
        took_ms = 1e3 * (time.perf_counter() - started)
        more = rt.status().budget.live_bytes - before
        print(f"3. forked three ways in {took_ms:.2f} ms for {more} bytes of state; three questions:")
        answers = await asyncio.gather(*(ask(fork, question) for fork, question in zip(forks, FACTS, strict=True)))
        for (question, (_, value)), answer in zip(FACTS.items(), answers, strict=True):
            show(question, answer, value)

        print(f"4. told one fork: {CORRECTION}")
        corrected, sibling = forks[0], forks[1]
        await corrected.send(CORRECTION, GREEDY).collect()

        points = {}
        for name, chat in (("corrected", corrected), ("sibling", sibling)):
            marks = {"bits": await fingerprint(chat)}
            point = await chat.pause()
            points[name] = marks | {"id": point.id}
            print(
                f"5. paused {name}: {point.position} tokens, {point.state_bytes / 1e6:.2f} MB of state, "
                f"{point.written_bytes / 1e6:.2f} MB written in {1e3 * point.seconds:.0f} ms"
            )
    (FOLDER / "points.json").write_text(json.dumps(points))


async def second(model: str) -> bool:
    """Resume in a process that has never seen the notebook."""
    points = json.loads((FOLDER / "points.json").read_text())
    equal = True
    async with open_runtime(model, budget=BUDGET, store=FOLDER / "sessions") as rt:
        for name, value in (("corrected", NEW_VALUE), ("sibling", FACTS[CORRECTED][1])):
            started = time.perf_counter()
            computed = rt.counters.prefilled_tokens
            chat = await rt.resume_chat(points[name]["id"])
            computed = rt.counters.prefilled_tokens - computed
            took_ms = 1e3 * (time.perf_counter() - started)
            same = await fingerprint(chat) == points[name]["bits"]
            equal = equal and same
            print(
                f"7. resumed {name} in {took_ms:.0f} ms, {computed} tokens computed again, "
                f"every bit {'equal' if same else 'DIFFERENT'}:"
            )
            show(CORRECTED, await ask(chat, CORRECTED), value)
    return equal


def main() -> None:
    if sys.argv[1:2] == ["--second"]:
        sys.exit(0 if asyncio.run(second(sys.argv[2])) else "a resumed state differs from the one that was paused")
    model = sys.argv[1] if len(sys.argv) > 1 else "nano"
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    asyncio.run(first(model))
    print("6. the process that read the notebook ends; a new one starts")
    sys.exit(subprocess.run([sys.executable, __file__, "--second", model], check=False).returncode)


if __name__ == "__main__":
    main()
