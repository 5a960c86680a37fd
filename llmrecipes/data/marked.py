"""Chat templates that are selected by name (`data.chat.template`), with `{% generation %}` around what the loss counts.

Each renders conversations of text as the template of the models it is named after, character by character. The marks
begin after the header of the assistant's turn and end with the token that ends the turn. Definitions and calls of
tools are left out: conversations here are text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmrecipes.recipe.schema import Chat

CHATML = """{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}
{{ message['content'] + '<|im_end|>' }}
{%- endgeneration -%}
{%- else -%}
{{ message['content'] + '<|im_end|>' }}
{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
"""OpenAI's ChatML: the template of Qwen 1.5 to 2.5 without their default system message."""

LLAMA3 = """{%- for message in messages -%}
{%- if loop.first -%}
{{ '<|begin_of_text|>' }}
{%- endif -%}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}
{{ message['content'] | trim + '<|eot_id|>' }}
{%- endgeneration -%}
{%- else -%}
{{ message['content'] | trim + '<|eot_id|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif -%}
"""
"""Meta-Llama-3-8B-Instruct; that of Llama 3.1 adds dates to the system message."""

QWEN3 = """{%- set ns = namespace(searching=true, last_query=messages|length - 1) -%}
{%- for message in messages[::-1] -%}
{%- if ns.searching and message.role == 'user' and not (message.content.startswith('<tool_response>')
    and message.content.endswith('</tool_response>')) -%}
{%- set ns.searching = false -%}
{%- set ns.last_query = messages|length - 1 - loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = message.content -%}
{%- if message.role == 'user' or message.role == 'system' -%}
{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' -%}
{%- set reasoning = '' -%}
{%- if message.reasoning_content is string -%}
{%- set reasoning = message.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{ '<|im_start|>assistant\\n' }}
{%- generation -%}
{%- if loop.index0 > ns.last_query and (loop.last or reasoning) -%}
{{ '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') + '<|im_end|>' }}
{%- else -%}
{{ content + '<|im_end|>' }}
{%- endif -%}
{%- endgeneration -%}
{{ '\\n' }}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
{{ '<|im_start|>user' }}
{%- endif -%}
{{ '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- else -%}
{{ raise_exception('no role ' + message.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{ '<think>\\n\\n</think>\\n\\n' }}
{%- endif -%}
{%- endif -%}
"""
"""Qwen3-8B: earlier reasoning is removed, and the last answer has a block of reasoning, which may be empty."""


@dataclass(frozen=True)
class Marked:
    """A template and its special tokens.

    Args:
        source: in Jinja.
        special: special tokens that the tokenizer must have; the last one ends an answer.
    """

    source: str
    special: tuple[str, ...]


SPECIAL = ("<|im_start|>", "<|im_end|>")
"""Special tokens of ChatML."""
TEMPLATES = {
    "chatml": Marked(CHATML, SPECIAL),
    "llama3": Marked(LLAMA3, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "qwen3": Marked(QWEN3, SPECIAL),
}
"""By the names of `data.chat.template`."""


def special_tokens(chat: Chat | None) -> tuple[str, ...]:
    """Special tokens of a tokenizer that is trained for conversations; none for text."""
    return () if chat is None else TEMPLATES[chat.template or "chatml"].special
