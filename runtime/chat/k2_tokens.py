"""Control tokens of Kimi K2's prompt format."""

USER = "<|im_user|>"
ASSISTANT = "<|im_assistant|>"
SYSTEM = "<|im_system|>"
MIDDLE = "<|im_middle|>"
END = "<|im_end|>"
END_OF_TEXT = "[EOS]"

SECTION_BEGIN = "<|tool_calls_section_begin|>"
SECTION_END = "<|tool_calls_section_end|>"
CALL_BEGIN = "<|tool_call_begin|>"
ARGUMENT_BEGIN = "<|tool_call_argument_begin|>"
CALL_END = "<|tool_call_end|>"

TURN_TOKENS = (USER, ASSISTANT, SYSTEM, MIDDLE, END)
TOOL_TOKENS = (SECTION_BEGIN, SECTION_END, CALL_BEGIN, ARGUMENT_BEGIN, CALL_END)
