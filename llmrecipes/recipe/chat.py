"""The section `data.chat`: conversations instead of documents, for supervised fine-tuning."""

from __future__ import annotations

from typing import Literal

from llmrecipes.recipe.section import PosInt, Section


class Chat(Section):
    """Sources hold conversations, which the tokenizer's chat template turns into text; the loss is on answers only."""

    messages_key: str = "messages"
    """Column of conversations: a list of objects with `role` and `content`."""
    prompt_key: str = "prompt"
    """Column of questions, in a source without `messages_key`: a conversation of one question and its answer."""
    completion_key: str = "completion"
    """Column of the answers to `prompt_key`."""
    template: Literal["chatml", "llama3", "qwen3"] | None = None
    """Built-in chat template with marked answers, whose special tokens the tokenizer has; unset: that of the tokenizer,
    and ChatML for a `bpe` tokenizer."""
    chat_template: str | None = None
    """File of a Jinja chat template, in place of `template`."""
    max_length: PosInt | None = None
    """Longest conversation, in tokens; unset: what a sequence holds, `model.seq_length` + 1."""
    overlong: Literal["truncate", "drop"] = "truncate"
    """Longer conversations: keep the first `max_length` tokens, or drop the whole conversation."""
    packing: bool = True
    """Several conversations in one sequence, none of which sees another; else one conversation in a sequence, and
    padding."""
