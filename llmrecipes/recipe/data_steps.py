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
    "language": DataStep(
        target=f"{NAMESPACE}.quality:language",
        takes={"languages": None, "min_probability": 0.5},
        extra="corpora",
        package="py3langid",
    ),
    "gopher": DataStep(target=f"{NAMESPACE}.quality:gopher", takes={"min_words": 50, "max_words": 100_000}),
    "repetition": DataStep(target=f"{NAMESPACE}.quality:repetition"),
    "personal_data": DataStep(target=f"{NAMESPACE}.cleaning:personal_data"),
    "decontaminate": DataStep(
        target=f"{NAMESPACE}.contamination:decontaminate", takes={"paths": None, "ngram_words": 13}
    ),
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
REQUIRED = {"language": "languages", "decontaminate": "paths"}
"""The key that a type does not work without."""
_CODES = """
ace af am an ar ary arz as az ba bcl be bg bn br bs ca crh cs cy da de dz el en eo es et eu ext fa
fi fo fr fuv fy ga gcf gcr gd gl gom grc gu gug guw ha hbo he hi hr ht hu hy id ig is it ja jv ka
kab kik kk km kn ko ku ky la lb lg lij ln lo lt ltg lv mg mk ml mn mr ms mt my ne nl nn no nso oc om
or pa pcm pl ps pt qu ro ru rw sa sdh se si sk sl sn so sq sr st sv sw ta te tg th tk tl tr tt ug uk
ur uz uzs vec vi vo wa wuu xh yo yue zh zu zxx
"""
LANGUAGES = tuple(_CODES.split())
"""Codes of ISO 639 that py3langid's model knows; zxx is text in no language."""


class Step(Section):
    """A step of cleaning. Steps are applied in order; what they drop is counted, with samples in the prepared data."""

    type: Literal[
        "html",
        "unicode",
        "length",
        "language",
        "gopher",
        "repetition",
        "personal_data",
        "decontaminate",
        "duplicates",
        "near_duplicates",
    ]
    """`html`: the text of documents that are web pages. `unicode`: repair text that was decoded wrongly (ftfy).
    `length`: limits of characters. `language`: drop documents in other languages. `gopher`, `repetition`: the quality
    and repetition rules of Gopher. `personal_data`: mask e-mail addresses and public IP addresses. `decontaminate`:
    drop documents that have a sequence of words in common with files, such as those of evaluation tasks. `duplicates`:
    drop documents that differ from an earlier one only in case, digits, punctuation, accents or white space.
    `near_duplicates`: drop documents that are nearly equal to an earlier one that was kept (MinHash); no copy of a
    training text is then held out."""
    main_content: bool | None = None
    """`html`: leave out navigation, headers, footers and forms; unset: true."""
    min_characters: PosInt | None = None
    """`length`: drop documents with less text; unset: none."""
    max_characters: PosInt | None = None
    """`length`: drop documents with more text; unset: none."""
    languages: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    """`language`: codes of ISO 639, such as `[en, de]`, to keep."""
    min_probability: Annotated[float | None, Field(ge=0, lt=1)] = None
    """`language`: drop documents whose language is less probable; unset: 0.5."""
    min_words: PosInt | None = None
    """`gopher`: drop documents with fewer words; unset: 50."""
    max_words: PosInt | None = None
    """`gopher`: drop documents with more words; unset: 100,000."""

    paths: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    """`decontaminate`: files or globs, of text or JSON lines, relative to the working directory."""
    ngram_words: Annotated[int | None, Field(ge=4)] = None
    """`decontaminate`: words of a sequence in common; unset: 13."""
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
