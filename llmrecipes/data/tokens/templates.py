"""The chat template of a recipe and of a prepared folder, and the templates selected by name (`data.chat.template`).

The latter have `{% generation %}` around what the loss counts. Each renders conversations of text as the template of
the models that it is named after, character by character. The marks begin after the header of the assistant's turn and
end with the token that ends the turn. Only `qwen3` has tools: with the others, conversations that have some are
rejected.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from llmrecipes import untrusted
from llmrecipes.data.folder.prepared import TOKENIZER, Prepared
from llmrecipes.data.tokens.chat import Template
from llmrecipes.data.tokens.encode import load
from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.tokenizer_section import HuggingFaceTokenizer

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

QWEN3 = """{%- if tools -%}
{{ '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') }}
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools -%}
{{ '\\n' + (tool | tojson) }}
{%- endfor -%}
{{ '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' }}
{{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": ' }}
{{- '<args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif -%}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) -%}
{%- for message in messages[::-1] -%}
{%- if ns.searching and message.role == 'user' and not (message.content.startswith('<tool_response>')
    and message.content.endswith('</tool_response>')) -%}
{%- set ns.searching = false -%}
{%- set ns.last_query = messages|length - 1 - loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = message.content -%}
{%- if message.role == 'system' and loop.first and tools -%}
{#- above, before the tools -#}
{%- elif message.role == 'user' or message.role == 'system' -%}
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
{{ '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else -%}
{{ content }}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{ '\\n' if content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' + (function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>' }}
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


NAME = "chat_template.jinja"
"""File of a prepared folder; Hugging Face tokenizers have the same."""
BUILT_IN = "built in (ChatML)"


def of_recipe(recipe: Recipe) -> Template:
    """The template of a recipe with `data.chat`: named, a file, the tokenizer's, or ChatML for a `bpe` tokenizer.

    Raises:
        UserError: there is none, the file cannot be read, it is not a Jinja template, or the tokenizer lacks a special
            token of the named one.
    """
    from llmrecipes.data.tokens import tokenizer

    section = recipe.data.tokenizer
    chat = recipe.data.chat
    if chat is None:
        raise ValueError(f"recipe {recipe.name} has no data.chat")
    source: str | None
    if section.type == "bpe":
        marked = TEMPLATES[chat.template or "chatml"]
        source = marked.source
        special = {"eos_token": marked.special[-1]}
        origin = BUILT_IN if chat.template is None else f"built in ({chat.template})"
    else:
        source, special = tokenizer.huggingface_template(section)
        origin = f"tokenizer {section.path}"
        if chat.template is not None:
            _require_special(section, chat.template)
            source = TEMPLATES[chat.template].source
            origin = f"built in ({chat.template})"
    if chat.chat_template is not None:
        source = read(Path(chat.chat_template))
        origin = chat.chat_template
    if source is None:
        named = tokenizer.existing(section)
        raise UserError(
            f"tokenizer {named.path!r} has no chat template",
            where="data.chat.chat_template",
            rule="a chat template turns messages into text; tokenizers of base models usually have none",
            fix=f"data.chat.template={_fitting(named)}; or data.chat.chat_template=FILE.jinja, for example the one of"
            " the model's instruction-tuned version",
        )
    template = Template(source, origin, tuple(sorted(special.items())))
    template.check()
    return template


def fitting(section: HuggingFaceTokenizer) -> list[str]:
    """Names of the built-in templates whose special tokens a Hugging Face tokenizer has."""
    from llmrecipes.data.tokens.tokenizer import huggingface_special

    has = huggingface_special(section)
    return [name for name, marked in TEMPLATES.items() if has.issuperset(marked.special)]


def _fitting(section: HuggingFaceTokenizer) -> str:
    return "|".join(fitting(section)) or "NAME with a tokenizer that has its special tokens"


def _require_special(section: HuggingFaceTokenizer, name: str) -> None:
    from llmrecipes.data.tokens.tokenizer import huggingface_special

    has = huggingface_special(section)
    if missing := [token for token in TEMPLATES[name].special if token not in has]:
        raise UserError(
            f"tokenizer {section.path!r} has no special token {missing[0]}",
            where=f"data.chat.template: {name}",
            rule="each special token of the template must be a single id of the tokenizer",
            fix=f"data.chat.template={_fitting(section)}; or data.chat.chat_template=FILE.jinja",
        )


def read(file: Path) -> str:
    """Text of a template file.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return untrusted.read(file.expanduser(), most=untrusted.RECORD).decode()
    except untrusted.Refused as error:
        raise UserError(error.what, where=f"data.chat.chat_template: {file}", rule=error.rule, fix=error.fix) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(
            f"cannot read: {reason}",
            where=f"data.chat.chat_template: {file}",
            fix="set it to a file with a Jinja template",
        ) from error


def of_prepared(prepared: Prepared) -> Template:
    """The template that made a folder's tokens.

    Raises:
        UserError: the folder has text, not conversations, or the template was changed.
    """
    record = prepared.manifest.chat
    if record is None:
        raise UserError(
            "the run was trained on text, not on conversations",
            where="--chat",
            rule="--chat needs a run with data.chat",
            fix="leave --chat out",
        )
    prepared.check([NAME], lambda line: None)
    template = Template(read(prepared.path / NAME), record.origin, tuple(sorted(record.special_tokens.items())))
    template.check()
    return template


@dataclass(frozen=True)
class Question:
    """A prompt for a model.

    Args:
        text: text of the template.
        ids: its tokens.
        end: id that ends an answer.
    """

    text: str
    ids: list[int]
    end: int


def question(prepared: Prepared, content: str) -> Question:
    """A conversation of one message, as the model was trained to answer it.

    Raises:
        UserError: see `of_prepared`; or the template refuses the message.
    """
    template = of_prepared(prepared)
    backend = _backend(prepared)
    text = template.prompt([{"role": "user", "content": content}])
    ids = backend.encode(text, add_special_tokens=False).ids
    return Question(text, ids, answer_end(prepared, template, content))


def ends_answers(template: Template, tokenizer_json: str) -> bool:
    """Whether what the loss counts of an answer has a special token, after which a model can stop."""
    backend = load(tokenizer_json, special_as_text=False)
    try:
        text, spans = template.spans([{"role": "user", "content": "."}, {"role": "assistant", "content": "."}], 1 << 20)
    except Exception:  # of the template; what it refuses is counted later
        return True
    ids = backend.encode(text[slice(*spans[-1])] if spans else "", add_special_tokens=False).ids
    added = backend.get_added_tokens_decoder()
    return any(number in added and added[number].special for number in ids)


def _backend(prepared: Prepared) -> tokenizers.Tokenizer:
    return load((prepared.path / TOKENIZER).read_text("utf-8"), special_as_text=False)


def answer_end(prepared: Prepared, template: Template, content: str = ".") -> int:
    """Id that ends an answer: its last special token, which need not be the end of a document.

    Args:
        prepared: data of a run on conversations.
        template: the one that made its tokens.
        content: what the user asks.

    Raises:
        UserError: the template refuses the message.
    """
    backend = _backend(prepared)
    user = {"role": "user", "content": content}
    limit = len(template.prompt([user])) + 1
    answered, spans = template.spans([user, {"role": "assistant", "content": "."}], limit)
    end = backend.encode(answered[slice(*spans[-1])] if spans else "", add_special_tokens=False).ids
    special = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    ends = [number for number in end if number in special]
    return ends[-1] if ends else prepared.tokenizer().eod
