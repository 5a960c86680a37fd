"""The chat template of a recipe, and of a prepared folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tokenizers

from llmrecipes import untrusted
from llmrecipes.data.chat import CHATML, SPECIAL, Template
from llmrecipes.data.prepared import TOKENIZER, Prepared
from llmrecipes.errors import UserError
from llmrecipes.recipe.schema import Recipe

NAME = "chat_template.jinja"
"""File of a prepared folder; Hugging Face tokenizers have the same."""
BUILT_IN = "built in (ChatML)"


def of_recipe(recipe: Recipe) -> Template:
    """The template of a recipe with `data.chat`: its file, the tokenizer's own, or ChatML for a `bpe` tokenizer.

    Raises:
        UserError: there is none, the file cannot be read, or it is no Jinja template.
    """
    from llmrecipes.data import tokenizer

    section, chat = recipe.data.tokenizer, recipe.data.chat
    if chat is None:
        raise ValueError(f"recipe {recipe.name} has no data.chat")
    source: str | None
    if section.type == "bpe":
        source, special, origin = CHATML, {"eos_token": SPECIAL[-1]}, BUILT_IN
    else:
        source, special = tokenizer.huggingface_template(section)
        origin = f"tokenizer {section.path}"
    if chat.chat_template is not None:
        source, origin = read(Path(chat.chat_template)), chat.chat_template
    if source is None:
        raise UserError(
            f"tokenizer {section.path!r} has no chat template",
            where="data.chat.chat_template",
            rule="a chat template turns messages into text; that of a base model's tokenizer is usually missing",
            fix="data.chat.chat_template=FILE.jinja, for example the one of the model's instruction-tuned version",
        )
    template = Template(source, origin, tuple(sorted(special.items())))
    template.check()
    return template


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
            f"cannot read: {reason}", where=f"data.chat.chat_template: {file}", fix="name a file with a Jinja template"
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
            rule="a chat template comes with the data of a run that has data.chat",
            fix="leave --chat out",
        )
    prepared.check([NAME], lambda line: None)
    template = Template(read(prepared.path / NAME), record.origin, tuple(sorted(record.special_tokens.items())))
    template.check()
    return template


@dataclass(frozen=True)
class Question:
    """What a model is to answer.

    Args:
        text: of the template.
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
    record = prepared.tokenizer()
    backend = tokenizers.Tokenizer.from_file(str(prepared.path / TOKENIZER))
    user = {"role": "user", "content": content}
    text = template.prompt([user])
    answered, spans = template.spans([user, {"role": "assistant", "content": "."}], len(text) + 1)
    # What ends an answer is the last special token of one, which need not be the end of a document.
    end = backend.encode(answered[slice(*spans[-1])] if spans else "", add_special_tokens=False).ids
    special = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    ends = [number for number in end if number in special]
    ids = backend.encode(text, add_special_tokens=False).ids
    return Question(text, ids, ends[-1] if ends else record.eod)
