"""`serai sessions`: what a store on disk holds, looked at, kept in order and moved without loading a model.

Here are the list of its commands, and the tree of sessions, of a running server or of a store, as text, JSON or a
picture. Looking is possible beside a process that has the store open; changing it is not.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serai.runtime.cli.monitor import DEFAULT_TARGET, open_source
from serai.runtime.cli.options import Json
from serai.runtime.cli.output import counted, reporting
from serai.runtime.cli.sessions_keep import fsck, gc, rm, tag
from serai.runtime.cli.sessions_look import diff, ls, resume, show
from serai.runtime.cli.sessions_move import export, import_, pull, push, settle
from serai.runtime.cli.stored import StoreFolder, open_to_look, store_folder

if TYPE_CHECKING:
    from serai.checkpoints.store import Store
    from serai.runtime.monitor.picture import TreeNode
    from serai.runtime.status import Status

app = typer.Typer(name="sessions", help="Look at stored sessions, keep them in order, move them.", no_args_is_help=True)
app.command("ls")(ls)
app.command("show")(show)
app.command("diff")(diff)
app.command("resume")(resume)
app.command("rm")(rm)
app.command("tag")(tag)
app.command("export")(export)
app.command("import")(import_)
app.command("push")(push)
app.command("pull")(pull)
app.command("settle")(settle)
app.command("gc")(gc)
app.command("fsck")(fsck)

LABEL_CELLS = 48


@app.command()
def tree(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL|SOCKET]", help="A server whose live sessions to show: its address, or its socket."
        ),
    ] = None,
    store: StoreFolder = None,
    demo: Annotated[bool, typer.Option("--demo", help="Sessions of a simulation.")] = False,
    svg: Annotated[Path | None, typer.Option(metavar="OUT", help="Draw the tree to this file.")] = None,
    budget_svg: Annotated[
        Path | None, typer.Option("--budget-svg", metavar="OUT", help="Draw the server's memory budget to this file.")
    ] = None,
    key: Annotated[str | None, typer.Option(envvar="SERAI_API_KEY", help="The server's key.")] = None,
    as_json: Json = False,
) -> None:
    """Show which session was forked from which: the stored ones, or with a target those of a running server."""
    with reporting(as_json=as_json) as out:
        import anyio

        from serai.runtime.errors import BadParameter
        from serai.runtime.monitor import picture
        from serai.runtime.monitor.text import fit

        live = demo or target is not None or (budget_svg is not None and store is None)
        if live and store is not None:
            raise BadParameter("--store shows stored sessions, and a target or --demo live ones; give one of them")
        if not live:
            if budget_svg is not None:
                raise BadParameter("--budget-svg draws the memory of a running server, and a store has none")
            with open_to_look(store) as opened:
                nodes, title = stored_nodes(opened), f"sessions in {store_folder(store)}"
        else:
            status = anyio.run(_status, target or DEFAULT_TARGET, key, demo)
            nodes, title = picture.session_nodes(status.sessions), f"sessions of {status.model}"
            if budget_svg is not None:
                _write(budget_svg, picture.budget_svg(status.budget, title=f"memory budget of {status.model}"))
        if svg is not None:
            _write(svg, picture.tree_svg(nodes, title=title))
        if as_json:
            out.result({"sessions": [asdict(node) for node in nodes]})
            return
        for node, depth in zip(nodes, picture.depths(nodes), strict=True):
            typer.echo(
                f"{fit('  ' * depth + node.label, LABEL_CELLS)} {fit(node.id, 26)}  {fit(node.detail, 60).rstrip()}"
            )


async def _status(target: str, key: str | None, demo: bool) -> "Status":
    source = open_source(target, key, demo)
    try:
        return await source.status()
    finally:
        await source.close()


def stored_nodes(store: "Store") -> "list[TreeNode]":
    """Every stored session once, depth first, siblings by age; a fork's parent is the session it continues from."""
    from serai.runtime.monitor.picture import TreeNode

    sessions = sorted(store.sessions(), key=lambda one: (one.created_s, one.session_id))
    parents = {one.session_id: _forked_from(store, one.head_id, one.session_id) for one in sessions}
    children: dict[str | None, list[TreeNode]] = {}
    for one in sessions:
        parent = parents[one.session_id] if parents[one.session_id] in parents else None
        detail = f"{one.position:,} tokens, turn {one.turn:,}, {counted(one.nodes, 'node')}"
        state = "" if one.has_snapshot else ", no state of its own"
        tier = "paused" if one.has_snapshot else "tokens only"
        node = TreeNode(one.session_id, parent, one.label or one.session_id[:8], detail + state, tier)
        children.setdefault(parent, []).append(node)
    made: list[TreeNode] = []
    stack = list(reversed(children.get(None, [])))
    while stack:
        made.append(stack.pop())
        stack.extend(reversed(children.get(made[-1].id, [])))
    return made


def _forked_from(store: "Store", head_id: str, session_id: str) -> str | None:
    """The session of the last node before this session's own."""
    for node_id in reversed(store.ancestry(head_id)):
        found = store.node(node_id).session_id
        if found != session_id:
            return found
    return None


def _write(path: Path, svg: str) -> None:
    from serai.runtime.errors import BadParameter

    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise BadParameter(f"{path} can't be written: {error.strerror}") from None
