"""The probably intended key for an unknown one."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from pydantic import BaseModel

from llmrecipes.recipe.document import MAX_KEY
from llmrecipes.recipe.keys import INDEX, ITEM, keys, normal
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.synonyms import synonym


@dataclass(frozen=True)
class Hint:
    """The probably intended keys, most likely first, and an explanation; either may be empty."""

    keys: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        if not self.keys:
            return self.note
        meant = f"did you mean {' or '.join(self.keys)}?"
        return f"{meant} {self.note}" if self.note else meant


def hint(name: str, document: type[BaseModel] = Recipe) -> Hint:
    """Hint for an unknown dotted key: the same name elsewhere, another framework's name for it, or a typo."""
    found = namesake(name, document)
    if not found.keys and not found.note:
        close = nearest(name, document)
        return Hint((close,) if close else ())
    return found


def namesake(name: str, document: type[BaseModel] = Recipe) -> Hint:
    """The key of that name in another section, or the key for another framework's key or option of that name."""
    known = keys(document)
    wanted = normal(name.lstrip("-").replace("-", "_"))
    leaf = wanted.rpartition(".")[2]
    if exact := synonym(name, whole=True):
        return Hint(tuple(_indexed(key, name) for key in exact.keys if key in known), exact.note)
    elsewhere = [key for key in known if key.rpartition(".")[2] == leaf and key != wanted]
    if elsewhere:
        return Hint((_indexed(_most_like(wanted, elsewhere), name),))
    foreign = synonym(name)
    if foreign and all(key in known for key in foreign.keys):
        return Hint(tuple(_indexed(key, name) for key in foreign.keys), foreign.note)
    return Hint()


def nearest(name: str, document: type[BaseModel] = Recipe) -> str | None:
    """The valid key that is spelt most like an invalid one, with its list indices, or None."""
    if len(name) > MAX_KEY:
        return None
    wanted = normal(name)
    known = keys(document)
    leaf = wanted.rpartition(".")[2]
    found = difflib.get_close_matches(wanted, known, n=1, cutoff=0.6)
    if not found:
        leaves = {key.rpartition(".")[2]: key for key in reversed(known)}
        found = [leaves[match] for match in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)]
    return _indexed(_most_like(wanted, found), name) if found else None


def _most_like(wanted: str, found: list[str]) -> str:
    return max(found, key=lambda key: difflib.SequenceMatcher(None, wanted, key).ratio())


def _indexed(key: str, name: str) -> str:
    """The key with the list indices of another name; the first item if that has none."""
    for index in INDEX.findall(name):
        key = key.replace(f".{ITEM}", f".{index}", 1)
    return key.replace(f".{ITEM}", ".0")
