"""Conversations to token ids, with a mark on those that the loss is computed on: what the assistant says.

Templates are run by transformers, in Jinja's sandbox. Like `encode`, this imports neither torch nor megatron.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers

from llmrecipes.data.sources.rows import READ_BY_TEMPLATES, TOOL_CALLS, TOOLS, common
from llmrecipes.data.tokens.encode import Encoded, load
from llmrecipes.errors import UserError
from llmrecipes.untrusted import require_ends

TEMPLATE_SECONDS = 10
"""CPU seconds in which an untrusted template writes a conversation of one message; others take milliseconds."""
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_WHOLE = 1 << 20
"""Characters of a conversation that are tokenized whatever is kept, so that what is cut off can be counted."""
Messages = list[dict[str, Any]]
Tools = Sequence[Any]

REJECTED = "rejected"
FORGED = "special_tokens"
UNANSWERED = "unanswered"
LONG = "too_long"
CUT = "cut"


@dataclass(frozen=True)
class Template:
    """A chat template and the special tokens that it refers to.

    Args:
        source: in Jinja.
        origin: where it is from, for messages.
        special_tokens: names and texts: `bos_token` and others.
    """

    source: str
    origin: str
    special_tokens: tuple[tuple[str, str], ...] = ()

    @property
    def marks_answers(self) -> bool:
        """Whether the template marks the assistant's part."""
        return _MARKED.search(self.source) is not None

    def require_reads(self, messages: Messages, tools: Tools) -> None:
        """Refuse a conversation with a part that the template never reads, so that it would be dropped.

        Raises:
            ValueError: with the key of a message, or `tools`.
        """
        present = [key for key in READ_BY_TEMPLATES if any(key in message for message in messages)]
        patterns = {key: rf"\.\s*{key}\b|['\"]{key}['\"]" for key in present}
        if tools:
            patterns[TOOLS] = rf"\b{TOOLS}\b"
        for key, pattern in patterns.items():
            if not re.search(pattern, self.source):
                raise ValueError(f"it does not read {key!r}")

    def check(self) -> None:
        """Compile the template, and render it once in the sandbox.

        Jinja's sandbox keeps a template from the machine, but lets it loop and allocate without limit. One that does so
        for every conversation is noticed; one that does so for some texts only is not.

        Raises:
            UserError: it is not a Jinja template, or takes too long or too much memory.
        """
        prompt: Messages = [{"role": "user", "content": ""}]
        try:
            import transformers.utils.chat_template_utils  # noqa: F401 - which takes seconds, before they are counted

            require_ends(
                lambda: (render(self, prompt), render(self, prompt, add_generation_prompt=True)),
                TEMPLATE_SECONDS,
                f"data.chat.chat_template: {self.origin}",
                "a chat template must render a one-message conversation within seconds",
            )
            render(self, prompt)
        except UserError:
            raise
        except ImportError as error:
            raise UserError(
                str(error), where="transformers", fix="install its dependencies (docs/guide/install.md)"
            ) from error
        except Exception as error:
            if type(error).__name__ != "TemplateSyntaxError":
                return  # the template refuses this conversation, perhaps rightly
            raise UserError(
                f"is not a chat template: {error}",
                where=f"data.chat.chat_template: {self.origin}",
                rule="a chat template must be valid Jinja",
                fix="fix the template, or set data.chat.chat_template to another file",
            ) from error

    def prompt(self, messages: Messages) -> str:
        """The text that the model is to answer.

        Raises:
            UserError: the template refuses these messages.
        """
        try:
            return render(self, messages, add_generation_prompt=True)[0]
        except Exception as error:  # of the template
            raise UserError(
                f"the chat template rejects these messages: {reason(error)}",
                where=self.origin,
                fix="use messages that the template accepts",
            ) from error

    def spans(self, messages: Messages, limit: int, tools: Tools = ()) -> tuple[str, list[tuple[int, int]]]:
        """A conversation's text, and the character ranges that the assistant says.

        Without `{% generation %}` in the template, an answer is what the template adds for it to the text of the
        messages before it, with the prompt for an answer. The assistant may begin the conversation.

        Args:
            messages: messages with roles and contents.
            limit: answers that begin at a later character may be missing.
            tools: definitions of tools that the assistant may call.

        Raises:
            UserError: what follows a message changes how it is rendered, so that answers cannot be located.
            Exception: whatever the template raises.
        """
        if self.marks_answers:
            return render(self, messages, tools=tools, marked=True)
        text, _ = render(self, messages, tools=tools)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            span = self._answer(messages, number, text, tools)
            if span is None:
                raise UserError(
                    f"the first {number + 1} of {len(messages)} messages render differently when later ones follow, "
                    "so answers cannot be located",
                    where=f"data.chat.chat_template: {self.origin}",
                    rule="a template must mark answers with {% generation %}, or render messages independently of "
                    "later ones",
                    fix="data.chat.template=qwen3 for a Qwen 3 tokenizer; or set data.chat.chat_template to a copy "
                    "of the template with {% generation %} … {% endgeneration %} around the assistant's text",
                )
            spans.append(span)
            if span[1] > limit:
                break
        return text, spans

    def _answer(self, messages: Messages, number: int, text: str, tools: Tools) -> tuple[int, int] | None:
        """Character range of an assistant's message in the text of a conversation; None if it cannot be located.

        Raises:
            Exception: whatever the template raises.
        """
        first = not any(message["role"] == "user" for message in messages[:number])
        try:
            before, _ = render(self, messages[:number], tools=tools, add_generation_prompt=True)
            rendered, _ = render(self, messages[: number + 1], tools=tools)
        except Exception:  # many templates look at the first message, or for one of the user
            if not first:
                raise
        else:
            if rendered.startswith(before) and text.startswith(rendered):
                return len(before), len(rendered)
        return self._answer_before_user(messages[: number + 1], text, tools) if first else None

    def _answer_before_user(self, messages: Messages, text: str, tools: Tools) -> tuple[int, int] | None:
        """As `_answer`, of the last of these messages, where the template does not render what is before it alone.

        A question behind it makes both complete: the text with the message is that without it, and what was inserted
        is the header of an answer, the answer, and what ends it.
        """
        question = {"role": "user", "content": "."}
        inserted, _ = render(self, [*messages, question], tools=tools)
        without, _ = render(self, [*messages[:-1], question], tools=tools)
        prompted, _ = render(self, [*messages, question], tools=tools, add_generation_prompt=True)
        header = prompted.removeprefix(inserted)
        size = len(inserted) - len(without)
        # The inserted part may begin anywhere from `least` to `most`: what is around it may begin or end as it does.
        most = common(inserted, without)
        least = len(without) - common(inserted[::-1], without[::-1])
        start = inserted.rfind(header, least, most + len(header)) if header else least
        end = start + size
        return (start + len(header), end) if start >= 0 and text.startswith(inserted[:end]) else None


def render(
    template: Template,
    messages: Messages,
    *,
    tools: Tools = (),
    add_generation_prompt: bool = False,
    marked: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """A conversation's text, and with `marked` the character ranges of answers.

    Raises:
        Exception: whatever the template raises.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        [messages],
        tools=list(tools) or None,
        chat_template=template.source,
        return_assistant_tokens_mask=marked,
        add_generation_prompt=add_generation_prompt,
        **dict(template.special_tokens),
    )
    texts, spans = rendered
    return texts[0], spans[0] if marked else []


@dataclass(frozen=True)
class ChatSpec:
    """How conversations are encoded.

    Args:
        template: template of the tokenizer.
        max_length: tokens that a conversation may have.
        truncate: cut longer ones; else they are dropped.
        pairs: documents are pairs of answers (`data.pairs`), each of which has the length with its prompt.
    """

    template: Template
    max_length: int
    truncate: bool
    pairs: bool = False


@dataclass(frozen=True)
class Conversations(Encoded):
    """Token ids of several conversations; one of no tokens is dropped.

    Args:
        answers: for each id a byte, 1 where the loss counts it.
        tallies: counts of each conversation, why it was dropped or that it was cut, and the tokens that were cut off
            (`cut_tokens`; of more than a million characters, at least).
        refusal: what the template said to the first one that it rejected.
    """

    answers: bytes
    tallies: list[dict[str, int]]
    refusal: str

    @property
    def tally(self) -> dict[str, int]:
        """Sums over all conversations."""
        return dict(sum(map(Counter, self.tallies), Counter[str]()))


def forged_tokens(backend: tokenizers.Tokenizer) -> re.Pattern[str]:
    """What a message must not say: a name of a special token would become that token, and end a user's turn."""
    special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    return re.compile("|".join(map(re.escape, special)) or "(?!)")


def chat_encoder(tokenizer_json: str, dtype: str, spec: ChatSpec) -> Callable[[list[bytes]], Conversations]:
    """Make the function that turns conversations (`rows.conversation`) into ids.

    Args:
        tokenizer_json: the tokenizer's `tokenizer.json`.
        dtype: NumPy name of the ids' type.
        spec: template and longest conversation.
    """
    backend = load(tokenizer_json, special_as_text=False)
    forged = forged_tokens(backend)
    # No token is longer, so a text of that many characters has more tokens than are kept; the rest is not tokenized.
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
    limit = max((spec.max_length + 1) * longest, _WHOLE)

    def written(messages: list[dict[str, Any]], tally: Counter[str]) -> tuple[str, list[tuple[int, int]] | None]:
        """The text of a conversation, and where its answers are; None for one that is dropped."""
        tools = messages[0].pop(TOOLS, [])
        if any(forged.search(said) for said in strings([messages, tools])):
            tally[FORGED] += 1
            return "", None
        if not any(_answers(message) for message in messages):
            tally[UNANSWERED] += 1
            return "", None
        spec.template.require_reads(messages, tools)
        text, spans = spec.template.spans(messages, limit, tools)
        if len(text) <= limit:  # else some spans may be missing
            _require_calls(messages, "".join(text[start:end] for start, end in spans))
        return text, spans

    def encode(documents: list[bytes]) -> Conversations:
        tallies: list[Counter[str]] = [Counter() for _ in documents]
        texts: list[str] = []
        all_spans: list[list[tuple[int, int]] | None] = []
        refusal = ""
        for document, tally in zip(documents, tallies, strict=True):
            messages = json.loads(document)
            text, spans = "", None
            try:
                text, spans = written(messages, tally)
            except UserError:
                raise
            except Exception as error:  # of the template, which may raise anything
                tally[REJECTED] += 1
                refusal = refusal or reason(error)
            texts.append(text[:limit])
            all_spans.append(spans)
        lengths: list[int] = []
        ids: list[np.ndarray] = []
        answers: list[np.ndarray] = []
        encodings = backend.encode_batch(texts, add_special_tokens=False)
        for encoding, spans, tally in zip(encodings, all_spans, tallies, strict=True):
            kept = None if spans is None else _kept(encoding, spans, spec, tally)
            lengths.append(0 if kept is None else len(kept))
            if kept is not None:
                ids.append(np.asarray(encoding.ids[: len(kept)], dtype))
                answers.append(kept)
        return Conversations(
            b"".join(part.tobytes() for part in ids),
            lengths,
            b"".join(part.tobytes() for part in answers),
            [dict(tally) for tally in tallies],
            refusal,
        )

    return encode


def _require_calls(messages: Messages, answers: str) -> None:
    for message in messages:
        for call in message.get(TOOL_CALLS, ()):
            name = call.get("function", call)["name"]
            if name not in answers:
                raise ValueError(f"it does not write the call of {name!r} into an answer")


def strings(value: Any) -> Iterator[str]:
    """All text in lists and objects, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for each in value:
            yield from strings(each)
        if isinstance(value, dict):
            yield from strings(list(value.values()))


def _answers(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and bool(message["content"].strip() or message.get(TOOL_CALLS))


def _kept(
    encoding: tokenizers.Encoding, spans: list[tuple[int, int]], spec: ChatSpec, tally: Counter[str]
) -> np.ndarray | None:
    """Mask of the kept tokens that are answers; None if the conversation is dropped."""
    beyond = len(encoding.ids) - spec.max_length
    if beyond > 0 and not spec.truncate:
        tally[LONG] += 1
        return None
    marks = np.fromiter(_marks(encoding.offsets[: spec.max_length], spans), np.uint8)
    # The first token is never predicted.
    if not marks[1:].any():
        tally[UNANSWERED] += 1
        return None
    if beyond > 0:
        tally[CUT] += 1
        tally[f"{CUT}_tokens"] += beyond
    return marks


def _marks(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> Iterator[bool]:
    """Whether each token begins in one of the character ranges, which are in order."""
    remaining = iter(spans)
    start, end = next(remaining, (0, 0))
    for place, _ in offsets:
        while place >= end > 0:
            start, end = next(remaining, (0, 0))
        yield start <= place < end


def reason(error: Exception) -> str:
    """What a template's error says, in a line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
