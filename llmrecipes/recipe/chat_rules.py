"""Rules of the section `data.chat`."""

from __future__ import annotations

from collections.abc import Iterator

from llmrecipes.recipe.document import Problem
from llmrecipes.recipe.schema import Recipe

CONVERSATIONS = ("docstrings", "jsonl", "parquet", "hub")
"""Types of sources that have conversations."""


def sources(recipe: Recipe) -> Iterator[Problem]:
    """Whether the sources have what is read of them: text, or conversations."""
    for index, source in enumerate(recipe.data.sources):
        key = f"data.sources.{index}"
        if recipe.data.chat is None:
            if source.type == "docstrings":
                yield Problem(
                    f"{key}.type",
                    "docstrings without data.chat",
                    "docstrings are questions and answers, not text",
                    "data.chat: {}, or type stdlib",
                )
            continue
        if source.type not in CONVERSATIONS:
            yield Problem(
                f"{key}.type",
                f"{source.type} with data.chat",
                f"conversations come from {', '.join(CONVERSATIONS)}",
                "type jsonl, or leave data.chat out",
            )
        if source.text_key != "text":
            yield Problem(
                f"{key}.text_key",
                f"{source.text_key!r} with data.chat",
                "columns of conversations are named in data.chat",
                "data.chat.messages_key, or data.chat.prompt_key and data.chat.completion_key",
            )


def length(recipe: Recipe) -> Iterator[Problem]:
    """The longest conversation fits into one sequence."""
    chat, holds = recipe.data.chat, recipe.model.seq_length + 1
    if chat is None or chat.max_length is None:
        return
    if not 1 < chat.max_length <= holds:
        yield Problem(
            "data.chat.max_length",
            f"{chat.max_length} tokens, and a sequence holds {holds}",
            "a conversation has at least two tokens, and at most model.seq_length + 1",
            f"max_length {holds}, or leave it out",
        )


def template(recipe: Recipe) -> Iterator[Problem]:
    """A template comes from one place."""
    chat = recipe.data.chat
    if chat is not None and chat.template is not None and chat.chat_template is not None:
        yield Problem(
            "data.chat.template",
            f"{chat.template} with data.chat.chat_template",
            "a template is built in or comes from a file",
            "leave one of template and chat_template out",
        )


def packing(recipe: Recipe) -> Iterator[Problem]:
    """What cannot keep the conversations of one sequence apart."""
    chat = recipe.data.chat
    if chat is None or not chat.packing:
        return
    obstacles = {
        "model.transformer_impl": (
            recipe.model.transformer_impl == "transformer_engine",
            "the attention that keeps packed conversations apart is that of the local layers",
            "transformer_impl local or auto",
        ),
        "model.mtp_num_layers": (
            recipe.model.mtp_num_layers,
            "multi-token prediction would predict the beginning of the next conversation",
            "leave mtp_num_layers out",
        ),
        "parallelism.context_parallel_size": (
            recipe.parallelism.context_parallel_size > 1,
            "context-parallel ranks split a sequence regardless of where conversations begin",
            "context_parallel_size 1",
        ),
    }
    for key, (found, rule, fix) in obstacles.items():
        if found:
            yield Problem(key, "set with data.chat.packing", rule, f"{fix}, or data.chat.packing false")


def objectives(recipe: Recipe) -> Iterator[Problem]:
    """What trials are compared by."""
    if recipe.data.chat and recipe.search and "valid_bits_per_byte" in recipe.search.objectives:
        yield Problem(
            "search.objectives",
            "valid_bits_per_byte with data.chat",
            "the loss counts the tokens of answers, and bits per byte those of the whole text",
            "valid_loss",
        )
