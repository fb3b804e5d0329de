"""A chat template with a place for tools, in the bundled tokenizer's words, and a tool."""

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}{{ '<|assistant|>\n' }}{% for c in m.tool_calls %}"
    '{{ \'<tool_call>{"name": "\' + c.function.name + \'", "arguments": \' }}{{ c.function.arguments | tojson }}'
    "{{ '}</tool_call>' }}{% endfor %}{{ eos_token + '\n' }}"
    "{% elif m.role == 'tool' %}{{ '<|user|>\n<said>' + m.content + '</said>' + eos_token + '\n' }}"
    "{% else %}{{ '<|' + m.role + '|>\n' + m.content }}"
    "{% if loop.first and tools %}{{ '\n# Tools' }}"
    "{% for t in tools %}{{ '\n' }}{{ t | tojson }}{% endfor %}{% endif %}"
    "{{ eos_token + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% if brief %}{{ 'In short: ' }}{% endif %}{% endif %}"
)

TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}

CALL = '<tool_call>\n{"name": "get_time", "arguments": {"town": "Halvik"}}\n</tool_call>'
"""As the model says it, in the form of Hermes."""


def called(arguments: str = '{"town": "Halvik"}') -> dict:
    """The assistant's message that calls the tool."""
    function = {"name": "get_time", "arguments": arguments}
    call = {"id": "call-1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def said(text: str) -> dict:
    """The tool's message."""
    return {"role": "tool", "tool_call_id": "call-1", "content": text}
