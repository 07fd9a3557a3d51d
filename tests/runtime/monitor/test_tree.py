"""Every session is listed exactly once, whatever the parents say."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from serai.runtime.monitor.tree import Order, Showing, rows
from tests.runtime.monitor.scripted import FAMILY, session

NAMES = st.sampled_from("abcdefgh")
FORESTS = st.dictionaries(NAMES, st.none() | NAMES, max_size=8)


@given(FORESTS, st.sampled_from(Order), st.booleans(), st.sets(NAMES))
def test_each_session_comes_once_even_among_circles(
    parents: dict[str, str | None], order: Order, reverse: bool, folded: set[str]
) -> None:
    sessions = [session(name, parent=parent) for name, parent in parents.items()]
    listed = rows(sessions, order=order, reverse=reverse, folded=folded)
    assert len({row.status.id for row in listed}) == len(listed)
    assert len(listed) + sum(row.hidden for row in listed) == len(sessions)


def test_forks_stand_under_what_they_were_forked_from() -> None:
    listed = rows(FAMILY)
    assert [f"{row.guide}{row.status.id}" for row in listed] == [
        "reader",
        "├─planner",
        "│ └─docs",
        "└─tests",
        "search",
    ]


def test_a_chain_of_a_thousand_forks_is_no_recursion() -> None:
    chain = [session(str(number), parent=str(number - 1)) for number in range(1_000)]
    assert [row.status.id for row in rows(chain)] == [str(number) for number in range(1_000)]


def test_filters_and_searches_keep_the_forks_of_what_they_leave_out() -> None:
    assert [row.status.id for row in rows(FAMILY, showing=Showing.BUSY)] == ["reader", "planner"]
    assert [row.status.id for row in rows(FAMILY, showing=Showing.TOOL)] == ["tests"]
    assert [row.status.id for row in rows(FAMILY, showing=Showing.COLD)] == ["search"]
    assert [(row.guide, row.status.id) for row in rows(FAMILY, query="DOCS")] == [("", "docs")]
    assert [row.status.id for row in rows(FAMILY, query="team-a")] == ["search"]


def test_orders_sort_by_what_they_name() -> None:
    first = {order: rows(FAMILY, order=order)[0].status.id for order in Order if order is not Order.TREE}
    assert first == {
        Order.RATE: "planner",
        Order.OWN: "reader",
        Order.POSITION: "search",
        Order.IDLE: "search",
        Order.LABEL: "docs",
    }
    assert rows(FAMILY, order=Order.RATE, reverse=True)[-1].status.id == "planner"


def test_a_folded_session_counts_what_it_hides() -> None:
    listed = rows([*FAMILY, replace(FAMILY[3], id="deep", parent="docs")], folded={"reader"})
    assert [(row.status.id, row.hidden) for row in listed] == [("reader", 4), ("search", 0)]
