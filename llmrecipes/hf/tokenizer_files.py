"""The tokenizer of prepared data as the files that transformers reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrecipes.data.folder.prepared import TOKENIZER
from llmrecipes.data.tokens.templates import NAME, answer_end, of_prepared
from llmrecipes.data.tokens.tokenizer import added_ids, existing, prefix_of, require_bounded
from llmrecipes.errors import UserError
from llmrecipes.hf.generation_config import FILE, IDS, of_run
from llmrecipes.hf.safetensors import write_json

if TYPE_CHECKING:
    from llmrecipes.data.folder.prepared import Prepared
    from llmrecipes.recipe.schema import Recipe

CONFIG = "tokenizer_config.json"


def write_companions(
    folder: Path, recipe: Recipe, prepared: Prepared | None, run_dir: Path, *, tokenizer: bool
) -> dict[str, Any]:
    """Write the tokenizer of a run, and generation_config.json.

    Args:
        folder: folder of the model.
        recipe: recipe of the run.
        prepared: its data.
        run_dir: the run.
        tokenizer: False: only generation_config.json.

    Returns:
        What config.json says of special tokens.

    Raises:
        UserError: as `write_tokenizer`.
    """
    special = write_tokenizer(folder, recipe, prepared) if tokenizer else {}
    if recipe.data.tokenizer.type != "huggingface":  # another tokenizer than that of a model which the run starts from
        run_dir = folder
    generation = of_run(run_dir, special, recipe.model.vocab_size)
    write_json(folder / FILE, generation)
    return {name: generation[name] for name in IDS if name in generation}


def write_tokenizer(folder: Path, recipe: Recipe, prepared: Prepared | None) -> dict[str, Any]:
    """Write the tokenizer that made a run's tokens.

    A `bpe` one is one file and its end-of-text token. A Hugging Face one is written by transformers, with its special
    tokens and chat template, from where the recipe names it. The template of a run on conversations is the one that
    made its tokens, and `eos_token` what ends an answer.

    Args:
        folder: folder of the model.
        recipe: recipe of the run.
        prepared: its data.

    Returns:
        Ids of special tokens. `eos_token_id` is a list where
        an answer ends with another token than a document; the first ends an answer.

    Raises:
        UserError: it is corrupt, can no longer be loaded, or has changed.
    """
    if prepared is None:
        special = _from_transformers(folder, recipe, None, None, None)
        _serve(folder)
        return special
    tokenizer = prepared.tokenizer()
    template = of_prepared(prepared) if prepared.manifest.chat is not None else None
    # A program that generates stops where an answer ends, and where a document does.
    ends = [tokenizer.eod] if template is None else list(dict.fromkeys([answer_end(prepared, template), tokenizer.eod]))
    end = tokenizer.backend.id_to_token(ends[0])
    if recipe.data.tokenizer.type == "huggingface":
        # A template that writes eos_token itself keeps its meaning; any other token may be the end of an answer.
        renamed = end if template is not None and "eos_token" not in template.source else None
        # What earlier versions prepared has no BOS; in conversations, the template decides.
        prefix = None if template is not None and prepared.manifest.tokenizer.prefix is None else tokenizer.prefix
        special = _from_transformers(folder, recipe, tokenizer.backend.get_vocab(), renamed, prefix)
    else:
        special = {"bos_token_id": None, "pad_token_id": None}
        (folder / TOKENIZER).write_bytes((prepared.path / TOKENIZER).read_bytes())
        write_json(
            folder / CONFIG,
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": end,
                "model_max_length": recipe.model.max_position_embeddings or recipe.model.seq_length,
                "clean_up_tokenization_spaces": False,  # ids decode to the text that they were made of
            },
        )
    if template is not None:
        (folder / NAME).write_text(template.source, "utf-8")
    _serve(folder)
    return {**special, "eos_token_id": ends[0] if len(ends) == 1 else ends}


_MARK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}(\s*)")


def serving_form(template: str) -> str:
    """A chat template without the marks of what the loss counts, which only transformers reads.

    Each mark becomes a comment: both remove the same whitespace around them, so that the text stays the same. Where
    variables are set between two marks, these become `with`, which keeps them inside, as the marks do.

    Args:
        template: in Jinja.

    Raises:
        jinja2.TemplateSyntaxError: it is not.
    """
    from jinja2 import Environment

    # Blocks, and what is between them: marks in comments, strings and raw text are none.
    parts = [""]
    inside, scoped = False, False
    for _, kind, value in Environment(keep_trailing_newline=True, autoescape=True).lex(template):
        if kind == "block_begin":
            parts.append("")
        parts[-1] += value
        if kind == "block_end":
            if mark := _MARK.fullmatch(parts[-1]):
                inside = mark[2] is None
            scoped |= inside and re.match(r"\{%[-+]?\s*set\b", parts[-1]) is not None
            parts.append("")
    if scoped:
        return "".join(_MARK.sub(r"{%\1 \2with \3%}\4", part) if _MARK.fullmatch(part) else part for part in parts)
    return "".join(_MARK.sub(r"{#\1 \3#}\4", part) if _MARK.fullmatch(part) else part for part in parts)


def _serve(folder: Path) -> None:
    """Write all chat templates of a folder, of which a tokenizer may have several by name, as `serving_form`."""
    for file in folder.rglob("*.jinja"):
        template = file.read_text("utf-8")
        if "generation" in template:
            file.write_text(serving_form(template), "utf-8")


def _for_earlier(config: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer_config.json of transformers 5 by names that transformers 4 reads too, which refuses the others."""
    # How and from where it was loaded.
    kept = {key: value for key, value in config.items() if key not in ("backend", "is_local", "local_files_only")}
    if kept.get("tokenizer_class") == "TokenizersBackend":
        kept["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(kept.get("extra_special_tokens"), list):
        kept["additional_special_tokens"] = kept.pop("extra_special_tokens")
    return kept


def _from_transformers(
    folder: Path, recipe: Recipe, vocabulary: dict[str, int] | None, end: str | None, prefix: tuple[int, ...] | None
) -> dict[str, Any]:
    """Save the tokenizer of the recipe, with another `eos_token` if `end` is set; a `vocabulary` must be the same.

    Its texts begin with `prefix`, as those of training; None: as the recipe says.
    """
    from transformers import AutoTokenizer

    section = existing(recipe.data.tokenizer)
    require_bounded(section)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            section.path, revision=section.revision or "main", trust_remote_code=False
        )
    except Exception as error:  # HTTP, DNS, missing files, unknown classes: each library below has its own errors
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            f"cannot load tokenizer {section.path!r}: {reason}",
            where="data.tokenizer",
            fix="check that this machine reaches the Hub (HF_ENDPOINT), or --no-tokenizer",
        ) from error
    if vocabulary is not None and tokenizer.get_vocab() != vocabulary:
        raise UserError(
            f"the data was prepared with a different tokenizer than {section.path!r}",
            where="data.tokenizer",
            rule="a model must be exported with the tokenizer of its training data",
            fix="set data.tokenizer.revision to the commit used then, or use --no-tokenizer",
        )
    if end is not None:
        tokenizer.eos_token = end
    before, after = added_ids(tokenizer.backend_tokenizer)
    if prefix is None:
        prefix = before if section.add_bos_token is None else prefix_of(section, tokenizer.backend_tokenizer, -1)
    if prefix != before:
        if prefix:
            tokenizer.bos_token = tokenizer.convert_ids_to_tokens(prefix[0])
        tokenizer.add_eos_token = bool(after)
        tokenizer.add_bos_token = bool(prefix)
    tokenizer.save_pretrained(folder)
    config = _for_earlier(json.loads((folder / CONFIG).read_text("utf-8")))
    if prefix or before:
        # Programs that do not read the post-processor of tokenizer.json look here.
        config |= {"add_bos_token": bool(prefix), "add_eos_token": bool(after)}
    write_json(folder / CONFIG, config)
    return {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "pad", "eos")}
