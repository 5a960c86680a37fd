"""The steps of `data.steps`: their keys, and the registry of their types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from llmrecipes.recipe.plugins import DataStep
from llmrecipes.recipe.section import PosInt, Section

NAMESPACE = "llmrecipes.data"
STEPS: dict[str, DataStep] = {
    "html": DataStep(
        target=f"{NAMESPACE}.cleaning:html", takes={"main_content": True}, extra="corpora", package="resiliparse"
    ),
    "unicode": DataStep(target=f"{NAMESPACE}.cleaning:unicode", extra="corpora", package="ftfy"),
    "length": DataStep(target=f"{NAMESPACE}.steps:length", takes={"min_characters": None, "max_characters": None}),
    "gopher": DataStep(target=f"{NAMESPACE}.quality:gopher", takes={"min_words": 50, "max_words": 100_000}),
    "repetition": DataStep(target=f"{NAMESPACE}.quality:repetition"),
    "personal_data": DataStep(target=f"{NAMESPACE}.cleaning:personal_data"),
    "duplicates": DataStep(target=f"{NAMESPACE}.copies:Duplicates", compares=True),
    "near_duplicates": DataStep(
        target=f"{NAMESPACE}.copies:NearDuplicates",
        takes={"threshold": 0.8, "permutations": 128, "shingle_words": 5},
        compares=True,
        extra="corpora",
        package="rensa",
    ),
}
"""What `data.steps[].type` may be. A step that compares documents comes after those that look at one."""


class Step(Section):
    """A step of cleaning. Steps are applied in order; what they drop is counted, with samples in the prepared data."""

    type: Literal["html", "unicode", "length", "gopher", "repetition", "personal_data", "duplicates", "near_duplicates"]
    """`html`: the text of documents that are web pages. `unicode`: repair text that was decoded wrongly (ftfy).
    `length`: limits of characters. `gopher`, `repetition`: the quality and repetition rules of Gopher. `personal_data`:
    mask e-mail addresses and public IP addresses. `duplicates`: drop documents that differ from an earlier one only in
    case, digits, punctuation, accents or white space. `near_duplicates`: drop documents that are nearly equal to an
    earlier one that was kept (MinHash); no copy of a training text is then held out."""
    main_content: bool | None = None
    """`html`: leave out navigation, headers, footers and forms; unset: true."""
    min_characters: PosInt | None = None
    """`length`: drop documents with less text; unset: none."""
    max_characters: PosInt | None = None
    """`length`: drop documents with more text; unset: none."""
    min_words: PosInt | None = None
    """`gopher`: drop documents with fewer words; unset: 50."""
    max_words: PosInt | None = None
    """`gopher`: drop documents with more words; unset: 100,000."""

    threshold: Annotated[float | None, Field(ge=0.1, lt=1)] = None
    """`near_duplicates`: share of their shingles that two documents have in common (Jaccard); unset: 0.8."""
    permutations: Annotated[int | None, Field(ge=16, le=1024)] = None
    """`near_duplicates`: hash values of a signature; more are more exact; unset: 128."""
    shingle_words: PosInt | None = None
    """`near_duplicates`: words of a shingle; unset: 5."""

    @property
    def settings(self) -> dict[str, Any]:
        """The values of its type's keys, with defaults."""
        values = self.model_dump(mode="json")
        return {key: default if values[key] is None else values[key] for key, default in STEPS[self.type].takes.items()}


Steps = Annotated[tuple[Step, ...], Field(strict=False)]
