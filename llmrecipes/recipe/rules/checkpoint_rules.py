"""Rules of the section `checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from llmrecipes.recipe.derived.degrees import multiples
from llmrecipes.recipe.document import Problem, clip
from llmrecipes.recipe.schema import Recipe
from llmrecipes.stores import NO_CREDENTIALS, PLAIN_URL, has_credentials, is_url


def retention(recipe: Recipe) -> Iterator[Problem]:
    """Which checkpoints are kept."""
    keep = recipe.checkpoint.keep_interval
    save = recipe.checkpoint.save_interval
    if keep is not None and keep % save:
        yield Problem(
            "checkpoint.keep_interval",
            f"{keep} is not a multiple of save_interval {save}",
            "only saved steps can be kept: keep_interval must be a multiple of save_interval",
            f"keep_interval {multiples(keep, save)}",
        )


def also_export(recipe: Recipe) -> Iterator[Problem]:
    """What is exported while the run trains; whether the model has a form there is checked at the start."""
    wanted = recipe.checkpoint
    every, save = wanted.also_export_interval, wanted.save_interval
    key = "checkpoint.also_export_interval"
    if every is not None and every % save:
        yield Problem(
            key,
            f"{every} is not a multiple of save_interval {save}",
            "only saved checkpoints can be exported",
            f"also_export_interval {multiples(every, save)}",
        )
    if wanted.also_export is not None and recipe.lora is not None and recipe.train.pretrained is None:
        yield Problem(
            "checkpoint.also_export",
            "hf with adapters of random initial weights",
            "a complete model is a base model with the adapters merged",
            "train.pretrained, or remove also_export",
        )


def copies(recipe: Recipe) -> Iterator[Problem]:
    """Where checkpoints are copied to."""
    url = recipe.checkpoint.copy_to
    key = "checkpoint.copy_to"
    if url is None:
        return
    if not is_url(url) or url.startswith(("http://", "https://", "hf://")):
        rule = "checkpoints are copied to an object store that can be written"
        yield Problem(
            key, clip(repr(url)), rule, "a URL such as s3://bucket/runs, gs://bucket/runs or file:///mnt/runs"
        )
    elif has_credentials(url) or urlsplit(url).query or urlsplit(url).fragment:
        yield Problem(key, "a URL with credentials or a query", NO_CREDENTIALS, f"s3://bucket/runs; {PLAIN_URL}")
