"""Pictures are well-formed whatever the labels say, and show what they are given."""

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from serai.runtime.monitor.picture import TreeNode, budget_svg, session_nodes, tree_svg
from tests.runtime.monitor.scripted import FAMILY, status

SVG = "{http://www.w3.org/2000/svg}"
ANY = st.text(st.characters() | st.sampled_from("<>&\"'\x00\x1b]"), max_size=30)


@given(ANY, ANY, ANY)
def test_any_text_makes_well_formed_xml(label: str, detail: str, title: str) -> None:
    nodes = [TreeNode("a", None, label, detail, "hot"), TreeNode(label, "a", detail, label, detail)]
    assert ElementTree.fromstring(tree_svg(nodes, title=title)).tag == f"{SVG}svg"


def test_a_tree_draws_each_session_and_each_fork_once() -> None:
    drawn = ElementTree.fromstring(tree_svg(session_nodes(FAMILY), title="sessions"))
    assert len(drawn.findall(f"{SVG}circle")) == len(FAMILY)
    assert len(drawn.findall(f"{SVG}path")) == 3
    text = "".join(drawn.itertext())
    assert "reader" in text
    assert "cold, 51,130 tokens, 0 bytes own" in text


def test_nodes_whose_parent_is_missing_or_later_stand_at_the_left() -> None:
    nodes = [TreeNode("a", "b", "a", "", "hot"), TreeNode("b", "a", "b", "", "hot"), TreeNode("c", "x", "c", "", "")]
    drawn = ElementTree.fromstring(tree_svg(nodes, title=""))
    assert [circle.get("cx") for circle in drawn.findall(f"{SVG}circle")] == ["16", "38", "16"]


def test_a_budget_fills_its_bar_and_says_what_is_over() -> None:
    drawn = ElementTree.fromstring(budget_svg(status().budget, title="budget"))
    bars = [rect for rect in drawn.findall(f"{SVG}rect") if rect.get("height") == "34"]
    assert round(sum(float(rect.get("width", "0")) for rect in bars)) == 728
    assert "over by" not in "".join(drawn.itertext())
    over = budget_svg(status(live_bytes=10**10).budget, title="budget")
    assert "over by 5.88 GB" in over
