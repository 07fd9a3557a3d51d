"""Grammars of Kimi K2's replies: text, then a section of calls whose arguments are JSON."""

from typing import TYPE_CHECKING

from serai.runtime.chat.grammars import TEXT, Held, as_object, function_of, run_of_calls, spelled
from serai.runtime.chat.k2_tokens import ARGUMENT_BEGIN, CALL_BEGIN, CALL_END, END, SECTION_BEGIN, SECTION_END
from serai.runtime.chat.segments import Segment, Tokenizer
from serai.runtime.sampling.grammar import json_rule

if TYPE_CHECKING:
    from serai.runtime.chat.conversation import Cursor


def k2_grammar(cursor: "Cursor", held: Held, tokenizer: Tokenizer) -> str:
    """The grammar of a reply that begins at `cursor`."""

    def control(*names: str) -> str:
        return spelled([Segment(name, markup=True) for name in names], tokenizer)

    rules = [TEXT, "said: TEXT" if held.schema is None else f"said: {json_rule(held.schema)}"]
    start = f"said {control(END)}"
    if held.may_call:
        section = f"{control(SECTION_BEGIN)} calls {control(SECTION_END, END)}"
        if held.least_calls:
            start = section
        elif held.schema is None:
            start = f"said ({control(END)} | {section})"
        else:
            start += f" | {section}"
        rules.append(f"calls: {run_of_calls(held.least_calls, held.most_calls)}")
        functions = [function_of(tool) for tool in held.tools]
        rules += [
            f"arguments_{place}: {json_rule(as_object(parameters))}" for place, (_, parameters) in enumerate(functions)
        ]
        for number in range(1, held.most_calls + 1):
            bodies = [
                f"{spelled([Segment(f'functions.{name}:{cursor.next_call + number - 1}')], tokenizer)} "
                f"{control(ARGUMENT_BEGIN)} arguments_{place}"
                for place, (name, _) in enumerate(functions)
            ]
            rules.append(f"call_{number}: {control(CALL_BEGIN)} ({' | '.join(bodies)}) {control(CALL_END)}")
    return "\n".join([f"start: {start}", *rules]) + "\n"
