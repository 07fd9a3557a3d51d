"""The keys, in one table: bindings, help and the command palette are made from it."""

from typing import NamedTuple


class Key(NamedTuple):
    """`keys` as Textual names them, `shown` as people do; `hint` is its short form for the bottom line, or empty."""

    keys: str
    shown: str
    action: str
    hint: str
    told: str


BACK = Key("escape", "esc", "back", "back", "Go back; show all sessions again")
VIEWS = (
    Key("1", "1", "view('sessions')", "", "Show the sessions"),
    Key("2", "2", "view('budget')", "", "Show the memory budget"),
    Key("3", "3", "view('experts')", "", "Show the expert cache"),
    Key("4", "4", "view('log')", "", "Show the log of events"),
    Key("enter", "enter", "open", "details", "Show the selected session in detail: what it says, memory, nodes"),
    Key("n", "n", "nodes", "nodes", "List its nodes and snapshots; f there forks at one"),
    Key("z", "z", "thoughts", "thoughts", "Fold or unfold reasoning"),
    BACK,
)
MOVES = (
    Key("up,k", "↑ k", "move(-1)", "", "Up"),
    Key("down,j", "↓ j", "move(1)", "", "Down"),
    Key("pageup", "pgup", "move_pages(-1)", "", "A page up"),
    Key("pagedown", "pgdn", "move_pages(1)", "", "A page down"),
    Key("home,g", "home g", "move_to(0)", "", "To the first line"),
    Key("end,G", "end G", "move_to(-1)", "", "To the last line"),
)
LISTING = (
    Key("slash", "/", "search", "search", "Search labels, namespaces and how ids begin"),
    Key("o", "o", "order", "order", "Order by the next column; the first order is the tree of forks"),
    Key("O", "O", "reverse", "", "Reverse the order"),
    Key("v", "v", "showing", "filter", "Show only busy, idle, hot, cold ... sessions"),
    Key("space", "space", "fold", "", "Fold or unfold the forks of the selected session"),
)
ACTIONS = (
    Key("f", "f", "act('fork')", "fork", "Fork the selected session where it stands, or at the node under the cursor"),
    Key("F", "F", "ask_fork", "", "Fork it at the end of an earlier turn, or at an earlier position"),
    Key("a", "a", "chat", "chat", "Ask it something in a fork of its own, which hears nothing of it"),
    Key("p", "p", "act('pause')", "pause", "Pause it: its state becomes durable and its memory free"),
    Key("r", "r", "act('resume')", "resume", "Resume it, or bring it back into memory"),
    Key("R", "R", "resume_other", "", "Resume any point, session or tag by its name"),
    Key("c", "c", "act('cancel')", "cancel", "Cancel the call it is in the middle of"),
    Key("t", "t", "ask_tag", "tag", "Tag the point where it stands"),
    Key("l", "l", "ask_label", "label", "Give it another label"),
    Key("x", "x", "ask_export", "export", "Write it to a file here, with all it continues from"),
    Key("d", "d", "act('delete')", "delete", "Erase it from memory and from the store"),
)
OTHERS = (
    Key("m", "m", "light_or_dark", "", "Light or dark"),
    Key("question_mark,f1", "?", "view('help')", "help", "Show the keys"),
    Key("q", "q", "quit", "quit", "Leave; the runtime goes on"),
)

GROUPS = (
    ("Views", VIEWS),
    ("Moving", MOVES),
    ("The list", LISTING),
    ("Acting on the selected session", ACTIONS),
    ("Others", OTHERS),
)
ALL = tuple(key for _, group in GROUPS for key in group)
