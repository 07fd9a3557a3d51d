"""What the simulated agents are asked, think and answer, and which of their nodes have snapshots."""

from serai.runtime.monitor.detail import NodeStatus, SessionDetail
from serai.runtime.monitor.transcript import Passage, Voice

_TOPICS = (
    (
        "Read the log of the failing run and say what happened first.",
        "The log has three errors. The second and third are timeouts, so they follow from something. The first is the "
        "refused connection at 14:02, before the deploy finished.",
        "The database refused connections at 14:02, eleven seconds before the first timeout. Everything after that "
        "follows from it: the pool kept twenty dead connections and handed them out in turn.",
    ),
    (
        "Plan the move of the parser to the new grammar.",
        "Two callers rely on the old error type. If the grammar goes first, both break at once; an adapter keeps them.",
        "1. Add the new grammar beside the old one.\n2. Move the callers, tests first.\n3. Remove the adapter once "
        "nothing names it.\nEach step is a commit that can be taken back alone.",
    ),
    (
        "Which of these three fixes is the smallest that is right?",
        "The first changes a public name. The third hides the error. The second is four lines and has a test.",
        "The second. It closes the file where it was opened, and its test fails without it.",
    ),
)


def demo_passages(number: int, tokens: int, *, answering: bool) -> tuple[Passage, ...]:
    """What agent `number` says after so many tokens of its present answer; all of it when it isn't `answering`."""
    asked, thought, answer = _TOPICS[number % len(_TOPICS)]
    words = max(tokens * 3 // 4, 1) if answering else 10_000
    thoughts = thought.split(" ")
    passages = [Passage(Voice.USER, asked), Passage(Voice.REASONING, " ".join(thoughts[:words]))]
    if words > len(thoughts):
        passages.append(Passage(Voice.ANSWER, " ".join(answer.split(" ")[: words - len(thoughts)])))
    return tuple(passages)


def demo_detail(
    session_id: str, number: int, position: int, turn: int, tokens: int, *, answering: bool
) -> SessionDetail:
    """Turns of growing length; every third node has a snapshot, the last two are kept in memory."""
    nodes: list[NodeStatus] = []
    count = 2 * (turn + 4)
    for index in range(count):
        where = position * (index + 1) ** 2 // count**2
        before = nodes[-1].position if nodes else 0
        nodes.append(
            NodeStatus(
                id=f"{session_id[:22]}{index:04}",
                kind="append" if index % 2 == 0 else "generate",
                position=where,
                turn=index // 2,
                tokens=where - before,
                stored=index % 3 == 0,
                in_memory=index >= count - 2,
            )
        )
    passages = demo_passages(number, tokens, answering=answering)
    return SessionDetail(session_id, position, passages, tuple(nodes), earlier_nodes=0)
