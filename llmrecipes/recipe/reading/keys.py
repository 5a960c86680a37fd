"""All keys of a recipe, or of another kind of document, from its schema: their types, ranges and defaults as text, the
probably intended one for an unknown key, and the generated reference.

The JSON Schema of all keys takes longer to make than a recipe takes to read, so what is asked of one key (`key_of`,
`is_key`, `options_of`) is answered from the schema of its field.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from llmrecipes.recipe.document import MAX_KEY
from llmrecipes.recipe.halves import half_of
from llmrecipes.recipe.reading.core_fields import LATENT, OF_MODELS, core_fields
from llmrecipes.recipe.reading.synonyms import synonym
from llmrecipes.recipe.schema import Recipe
from llmrecipes.recipe.sections.section import EXECUTION

ITEM = "N"  # placeholder for the index in a list: data.sources.N.path
INDEX = re.compile(r"(?<=\.)[0-9]{1,6}(?=\.|$)")


@dataclass(frozen=True)
class RecipeKey:
    """One key or section: dotted name, accepted values as text, default, and the description from the schema."""

    name: str
    takes: str
    required: bool
    default: Any
    description: str
    section: bool = False
    free: bool = False
    """A mapping with user-defined keys."""
    options: tuple[Mapping[str, Any], ...] = ()
    """JSON Schema of each accepted type."""
    by_type: Mapping[str, RecipeKey] = field(default_factory=dict)
    """In a section of several types: what the key is in each type that has it."""
    beside: tuple[RecipeKey, ...] = ()
    """Of one type: the other keys of the section."""

    @property
    def default_text(self) -> str:
        return "required" if self.required else json.dumps(self.default)


def schema(document: type[BaseModel]) -> dict[str, Any]:
    """JSON Schema of a document, with the text below each field as its description."""
    return document.model_json_schema(schema_generator=_Described)


def keys(document: type[BaseModel] = Recipe) -> dict[str, RecipeKey]:
    """All keys and sections by dotted name, in the schema's order; list items are written `N`."""
    return _keys(document)


@cache
def _keys(document: type[BaseModel]) -> dict[str, RecipeKey]:
    described = schema(document)
    return {key.name: key for key in _walk(described, "", described.get("$defs", {}))}


@cache
def _keys_of_field(section: type[BaseModel], name: str) -> dict[str, RecipeKey]:
    """The keys of one field, which a model of its own has, without their descriptions; empty for an unknown one."""
    if name not in section.model_fields:
        return {}
    info = section.model_fields[name]
    fields: dict[str, Any] = {name: (info.annotation, info)}
    described = create_model(section.__name__, __config__=section.model_config, **fields).model_json_schema()
    return {key.name: key for key in _walk(described, "", described.get("$defs", {}))}


def key_of(name: str, document: type[BaseModel] = Recipe) -> RecipeKey | None:
    """The key or section of a dotted name (named as in its own section), without its description; None for no key."""
    section, rest = _innermost(name, document)
    return _keys_of_field(section, rest.partition(".")[0]).get(normal(rest))


def normal(name: str) -> str:
    """`data.sources.0.path` as in `keys()`: `data.sources.N.path`."""
    return INDEX.sub(ITEM, name)


def is_key(name: str, document: type[BaseModel] = Recipe) -> bool:
    """Whether a dotted name is a key or section, or inside a mapping with user-defined keys."""
    section, rest = _innermost(name, document)
    parts = rest.split(".")
    known = _keys_of_field(section, parts[0])
    above = (known.get(normal(".".join(parts[:depth]))) for depth in range(1, len(parts)))
    return normal(rest) in known or ("" not in parts and any(parent is not None and parent.free for parent in above))


def options_of(name: str, document: type[BaseModel] = Recipe) -> tuple[Mapping[str, Any], ...]:
    """JSON Schema of each type that a dotted key, or an item of a list, accepts; empty for an unknown key."""
    section, rest = _innermost(name, document)
    known = _keys_of_field(section, rest.partition(".")[0])
    if normal(rest) in known:
        return known[normal(rest)].options
    above, _, index = rest.rpartition(".")
    if not index.isdecimal() or normal(above) not in known:
        return ()
    lists = known[normal(above)].options
    fixed = [node["prefixItems"][int(index)] for node in lists if int(index) < len(node.get("prefixItems", ()))]
    return (*fixed, *(node["items"] for node in lists if "items" in node))


def admits(node: Mapping[str, Any], number: int | float) -> bool:
    """Whether a type of `options_of` accepts a number."""
    if node.get("type") != "number" and not (node.get("type") == "integer" and isinstance(number, int)):
        return False
    above = node.get("exclusiveMinimum", -math.inf) < number and node.get("minimum", -math.inf) <= number
    return above and number < node.get("exclusiveMaximum", math.inf) and number <= node.get("maximum", math.inf)


class _Described(GenerateJsonSchema):
    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        described = super().model_schema(schema)
        for section in schema["cls"].__mro__:
            for name, text in _texts(section).items():
                described["properties"][name].setdefault("description", text)
        return described


def _texts(section: type) -> dict[str, str]:
    """The texts below the fields of a class."""
    if not issubclass(section, BaseModel) or section is BaseModel:
        return {}
    body = next(node.body for node in _classes(sys.modules[section.__module__]) if node.name == section.__name__)
    return {
        declared.target.id: inspect.cleandoc(text.value.value)
        for declared, text in pairwise(body)
        if isinstance(declared, ast.AnnAssign) and isinstance(declared.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


@cache
def _classes(module: ModuleType) -> list[ast.ClassDef]:
    tree = ast.parse(Path(str(module.__file__)).read_text("utf-8"))
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def _innermost(name: str, document: type[BaseModel]) -> tuple[type[BaseModel], str]:
    """The section that has a key or would have it, and the key's name in it."""
    section, rest = document, name
    while "." in rest:
        part, _, below = rest.partition(".")
        info = section.model_fields.get(part)
        annotation = None if info is None else info.annotation
        if get_origin(annotation) is tuple:
            index, _, below = below.partition(".")
            if not (index == ITEM or INDEX.fullmatch(f".{index}", 1)):
                break
        types = [type_ for type_ in (annotation, *get_args(annotation)) if get_origin(type_) is None]
        inner = [type_ for type_ in types if inspect.isclass(type_) and issubclass(type_, BaseModel)]
        if len(inner) != 1 or not below:
            break
        section, rest = inner[0], below
    return section, rest


def _walk(schema: dict[str, Any], prefix: str, defs: dict[str, Any]) -> Iterator[RecipeKey]:
    if "discriminator" in schema:
        yield from _walk_types(schema, prefix, defs)
        return
    required = schema.get("required", [])
    for name, raw in schema["properties"].items():
        dotted = f"{prefix}{name}"
        node = _section_of(_resolve(raw, defs), defs)
        item = _resolve(node.get("items", {}), defs)
        section = is_section(node)
        yield RecipeKey(
            name=dotted,
            takes=_takes(node, defs),
            required=name in required,
            default=raw.get("default"),
            # A section's description is that of its class, a key's that of the field.
            description=raw.get("description") or node.get("description", ""),
            section=section,
            free=node.get("type") == "object" and not section,
            options=tuple(_resolve(option, defs) for option in node.get("anyOf", [node])),
        )
        if section:
            yield from _walk(node, f"{dotted}.", defs)
        elif is_section(item):
            yield RecipeKey(f"{dotted}.{ITEM}", "a mapping", False, None, item.get("description", ""), section=True)
            yield from _walk(item, f"{dotted}.{ITEM}.", defs)


def _walk_types(schema: dict[str, Any], prefix: str, defs: dict[str, Any]) -> Iterator[RecipeKey]:
    """The keys of a section of several types, each once."""
    by_name = defaultdict[str, dict[str, RecipeKey]](dict)
    for option in schema["oneOf"]:
        node = _resolve(option, defs)
        name = node["properties"]["type"]["const"]
        chosen, *others = _walk(node, prefix, defs)
        chosen = replace(chosen, description=node.get("description", ""), beside=tuple(others))
        for key in (chosen, *others):
            by_name[key.name][name] = key
    for by_type in by_name.values():
        each = list(by_type.values())
        options = tuple({json.dumps(option): option for key in each for option in key.options}.values())
        takes = " or ".join(dict.fromkeys(key.takes for key in each))
        required = len(each) == len(schema["oneOf"]) and all(key.required for key in each)
        key = replace(each[0], takes=takes, required=required, options=options, by_type=by_type)
        if key.name == f"{prefix}type":
            enum = {"enum": list(by_type)}
            key = replace(key, takes=_takes(enum, defs), options=(enum,), description="The type.")
        yield key


def is_section(node: Mapping[str, Any]) -> bool:
    """Whether a JSON Schema node is of a section, of one type or several."""
    return "properties" in node or "discriminator" in node


def _resolve(node: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    reference = node.get("$ref")
    return defs[reference.rpartition("/")[2]] if reference else node


def _section_of(node: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """The section of a key that is a section or null; any other node as it is."""
    options = [_resolve(option, defs) for option in node.get("anyOf", ())]
    sections = [option for option in options if is_section(option)]
    return (
        sections[0]
        if len(sections) == 1 and all(option.get("type", "object") in ("object", "null") for option in options)
        else node
    )


def _takes(node: dict[str, Any], defs: dict[str, Any]) -> str:
    """A JSON Schema node as text: `an integer greater than 0`."""
    if not node:
        return "any value"
    if "anyOf" in node:
        options = [_resolve(option, defs) for option in node["anyOf"]]
        if any(option.get("type") == "array" for option in options):
            options.sort(key=lambda option: option.get("type") != "null")  # last, `or null` would seem to be an item
        return " or ".join(_takes(option, defs) for option in options)
    if "enum" in node:
        return "one of " + ", ".join(str(value) for value in node["enum"])
    match node.get("type"):
        case "integer" | "number" as kind:
            words = "an integer" if kind == "integer" else "a finite number"
            return words + _range(node)
        case "boolean":
            return "true or false"
        case "string":
            words = "a non-empty string" if node.get("minLength") else "a string"
            return f"a string matching {node['pattern']}" if "pattern" in node else words
        case "null":
            return "null"
        case "array" if "prefixItems" in node:
            items = [_takes(_resolve(item, defs), defs) for item in node["prefixItems"]]
            if len(set(items)) == 1:
                return f"a list of {len(items)} values, each {items[0]}"
            return "a list of " + ", ".join(items)
        case "array":
            least = node.get("minItems", 0)
            words = "a list" if least == 0 else "a non-empty list" if least == 1 else f"a list of at least {least}"
            return f"{words}, each item {_takes(_resolve(node['items'], defs), defs)}"
        case "object" if "properties" not in node:
            # Pydantic represents mappings with a key pattern differently from those with any key.
            values = node.get("additionalProperties") or next(iter(node["patternProperties"].values()))
            value = _resolve(values, defs)
            return f"a mapping from names to {_takes(value, defs)}"
    return "a mapping"


_BOUNDS = {
    "exclusiveMinimum": "greater than",
    "minimum": "at least",
    "exclusiveMaximum": "less than",
    "maximum": "at most",
}


def _range(node: dict[str, Any]) -> str:
    parts = [f"{words} {node[bound]:g}" for bound, words in _BOUNDS.items() if bound in node]
    return " " + " and ".join(parts) if parts else ""


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
    """Hint for an unknown dotted key: the same name elsewhere, another framework's name for it, a field of
    megatron-core, or a typo."""
    same_name = namesake(name, document)
    if same_name.keys or same_name.note:
        return same_name
    leaf = name.rpartition(".")[2]
    if owner := core_fields().get(leaf):
        taken = f"set model.extra.{leaf}: fields of megatron-core's {owner} without a key go there"
        none = f"recipes have no key for this field of megatron-core's {owner}"
        return Hint(note=taken if owner in (*OF_MODELS, LATENT) else none)
    close = nearest(name, document)
    return Hint((close,) if close else ())


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
    matches = difflib.get_close_matches(wanted, known, n=1, cutoff=0.6)
    if not matches:
        leaves = {key.rpartition(".")[2]: key for key in reversed(known)}
        matches = [leaves[match] for match in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)]
    return _indexed(_most_like(wanted, matches), name) if matches else None


def _most_like(wanted: str, candidates: list[str]) -> str:
    return max(candidates, key=lambda key: difflib.SequenceMatcher(None, wanted, key).ratio())


def _indexed(key: str, name: str) -> str:
    """The key with the list indices of another name; the first item if that has none."""
    for index in INDEX.findall(name):
        key = key.replace(f".{ITEM}", f".{index}", 1)
    return key.replace(f".{ITEM}", ".0")


def json_schema() -> str:
    """JSON Schema (draft 2020-12) of a recipe file, for editors and other programs."""
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema(Recipe)}
    model = document["$defs"]["Model"]
    model["required"].remove("num_layers")
    model["anyOf"] = [{"required": [name]} for name in ("num_layers", "hybrid_layer_pattern")]
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def reference() -> str:
    """The Markdown page of all keys: type, default, description."""
    lines = [
        "# Recipe keys",
        "",
        "Generated from `llmrecipes/recipe/` by `llmrecipes docs`; do not edit. Key names are Megatron's.",
        "`N` stands for an index, counted from 0, in files a list item and in overrides a number.",
        "A key whose default is `null` takes `null` too. \\* marks how a run is executed, which changes numbers by",
        "rounding only; all other keys say what is learned.",
    ]
    top = [key for key in keys().values() if "." not in key.name and not key.section]
    lines += ["", "## Top level", "", *_table(top)]
    for section in (key for key in keys().values() if key.section):
        members = [key for key in keys().values() if key.name.rpartition(".")[0] == section.name and not key.section]
        members = [key for key in members if not _is_of_sources(key)]
        lines += ["", f"## {section.name}", "", section.description, "", *_table(members)]
    return "\n".join(lines) + "\n"


def generated(root: Path) -> dict[Path, str]:
    """The generated files of a checkout with their expected text."""
    return {root / "docs" / "reference" / "keys.md": reference(), root / "recipes" / "schema.json": json_schema()}


def _table(members: list[RecipeKey]) -> list[str]:
    rows = ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
    chosen = members[0]
    if not (chosen.by_type and chosen.name.endswith(".type")):
        return rows + [_row(key) for key in members]
    types = list(chosen.by_type.values())
    common = [key for key in types[0].beside if all(key in of_type.beside for of_type in types)]
    rows += map(_row, [replace(chosen, takes="a type below"), *common])
    shown: list[RecipeKey] = []
    for name, of_type in chosen.by_type.items():
        own = [key for key in of_type.beside if key not in common]
        new = [key for key in own if key not in shown]
        also = ", ".join(f"`{key.name.rpartition('.')[2]}`" for key in own if key in shown)
        rows.append(f"| `type: {name}` ||| {_cell(of_type.description)}{f' Also: {also}.' if also else ''} |")
        rows += map(_row, new)
        shown += new
    return rows


def _is_of_sources(key: RecipeKey) -> bool:
    """Whether a key of a held-out set is that of `data.sources`."""
    twin = keys().get(key.name.replace(".valid_sources.", ".sources."), key)
    return twin.name != key.name and twin.description == key.description


def _row(key: RecipeKey) -> str:
    default = key.default_text if key.required else f"`{key.default_text}`"
    takes = key.takes.removesuffix(" or null") if key.default_text == "null" else key.takes
    mark = " \\*" if half_of(key.name) is EXECUTION else ""
    return "| " + " | ".join(map(_cell, (f"`{key.name}`{mark}", _short(takes), default, key.description))) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


_TYPES = {
    "a finite number": "number",
    "an integer": "integer",
    "a string": "string",
    "a non-empty string": "string",
    "true or false": "boolean",
}
_SIGNS = {"greater than": ">", "at least": "≥", "less than": "<", "at most": "≤", " from names to any value": ""}


def _short(takes: str) -> str:
    """The values of a key, for a column of hundreds: `integer > 0`, `rope, yarn`."""
    for words, sign in (_TYPES | _SIGNS).items():
        takes = takes.replace(words, sign)
    return takes.removeprefix("one of ")
