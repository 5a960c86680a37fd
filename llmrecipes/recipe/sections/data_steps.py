"""The steps of `data.steps`: a class for each type, with its keys and what makes it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llmrecipes.recipe.sections.only_with import OnlyWith
from llmrecipes.recipe.sections.plugins import DataStep
from llmrecipes.recipe.sections.section import NonNegInt, PosFloat, PosInt, Probability, Variant

_Names = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
_CODES = """
ace af am an ar ary arz as az ba bcl be bg bn br bs ca crh cs cy da de dz el en eo es et eu ext fa
fi fo fr fuv fy ga gcf gcr gd gl gom grc gu gug guw ha hbo he hi hr ht hu hy id ig is it ja jv ka
kab kik kk km kn ko ku ky la lb lg lij ln lo lt ltg lv mg mk ml mn mr ms mt my ne nl nn no nso oc om
or pa pcm pl ps pt qu ro ru rw sa sdh se si sk sl sn so sq sr st sv sw ta te tg th tk tl tr tt ug uk
ur uz uzs vec vi vo wa wuu xh yo yue zh zu zxx
"""
LANGUAGES = tuple(_CODES.split())
"""Codes of ISO 639 that py3langid's model knows; zxx is text in no language."""


class StepSection(Variant):
    """A step of any type."""

    does: ClassVar[DataStep]
    needs_one: ClassVar[tuple[str, ...]] = ()  # keys of which at least one must be set

    @property
    def settings(self) -> dict[str, Any]:
        """The values of its keys."""
        return {key: value for key, value in self if key != "type"}


class HtmlStep(StepSection):
    """Extract the text of documents that are web pages."""

    does = DataStep(
        target="llmrecipes.data.steps.cleaning:html",
        takes_markup=True,
        revision=2,
        extra="corpora",
        package="resiliparse",
    )
    type: Literal["html"]
    main_content: bool = True
    """Remove navigation, headers, footers and forms."""


class UnicodeStep(StepSection):
    """Repair text that was decoded wrongly (ftfy)."""

    does = DataStep(target="llmrecipes.data.steps.cleaning:unicode", takes_markup=True, extra="corpora", package="ftfy")
    type: Literal["unicode"]
    unescape_html: bool = False
    """Replace HTML entities in texts without `<`, as FineWeb does."""


class LengthStep(StepSection):
    """Limit the number of characters."""

    does = DataStep(target="llmrecipes.data.steps.steps:length", takes_markup=True)
    needs_one = ("min_characters", "max_characters")
    type: Literal["length"]
    min_characters: PosInt | None = None
    """Drop documents with less text; unset: no minimum."""
    max_characters: PosInt | None = None
    """Drop documents with more text; unset: no maximum."""


class LanguageStep(StepSection):
    """Drop documents in other languages."""

    does = DataStep(target="llmrecipes.data.steps.quality:language", revision=2, extra="corpora", package="py3langid")
    type: Literal["language"]
    languages: _Names
    """Languages to keep, as ISO 639 codes such as `[en, de]`; `zh`, `ar`, `ku`, `lv`, `no` and `uz` stand for their
    varieties too."""
    min_probability: Probability = 0.5
    """Minimum probability that a document has one of the languages, together; others are dropped."""


class GopherStep(StepSection):
    """The quality rules of Gopher."""

    does = DataStep(target="llmrecipes.data.steps.quality:gopher")
    type: Literal["gopher"]
    min_words: PosInt = 50
    """Drop documents with fewer words."""
    max_words: PosInt = 100_000
    """Drop documents with more words."""


class RepetitionStep(StepSection):
    """The repetition rules of Gopher."""

    does = DataStep(target="llmrecipes.data.steps.quality:repetition")
    type: Literal["repetition"]


class C4Step(StepSection):
    """The rules of C4, which also remove lines."""

    does = DataStep(target="llmrecipes.data.steps.quality:c4", revision=2)
    type: Literal["c4"]
    terminal_punctuation: bool = True
    """Remove lines that do not end with a punctuation mark. FineWeb sets it to false."""
    min_sentences: PosInt = 5
    """Drop documents with fewer sentences in the remaining lines."""


class FineWebStep(StepSection):
    """The rules of FineWeb."""

    does = DataStep(target="llmrecipes.data.steps.quality:fineweb", revision=2)
    type: Literal["fineweb"]


class CodeStep(StepSection):
    """StarCoder2's rules for source code."""

    does = DataStep(target="llmrecipes.data.steps.quality:code")
    type: Literal["code"]
    max_line_length: PosInt = 1000
    """Drop files with a longer line, in characters."""
    max_mean_line_length: PosInt = 100
    """Drop files whose lines are longer on average."""


class ClassifierStep(StepSection):
    """Keep documents to which a fastText model gives certain labels."""

    does = DataStep(target="llmrecipes.data.steps.quality:classifier", extra="corpora", package="fasttext")
    type: Literal["classifier"]
    model: str
    """File of a supervised fastText model, `.bin` or `.ftz`, relative to the working directory."""
    labels: _Names
    """Labels of the documents to keep, without `__label__`."""
    min_probability: Probability = 0.5
    """Minimum probability that a document has one of the labels, together; others are dropped."""


class PersonalDataStep(StepSection):
    """Mask e-mail addresses and public IP addresses."""

    does = DataStep(target="llmrecipes.data.steps.cleaning:personal_data", takes_markup=True, revision=2)
    type: Literal["personal_data"]


class DecontaminateStep(StepSection):
    """Drop documents that share a sequence of words with files, such as those of evaluation tasks."""

    does = DataStep(target="llmrecipes.data.steps.contamination:decontaminate", takes_markup=True, revision=2)
    needs_one = ("paths", "tasks")
    type: Literal["decontaminate"]
    paths: _Names | None = None
    """Files or globs of text, JSON lines or Parquet, samples logged by lm-evaluation-harness, or YAML files of its
    tasks with local data."""
    tasks: _Names | None = None
    """Tasks, groups or tags of lm-evaluation-harness (extra eval), with data in local files or in the Hub's cache."""
    ngram_words: Annotated[int, Field(ge=4)] = 13
    """Words in a shared sequence."""


class DuplicatesStep(StepSection):
    """Drop documents that differ from an earlier one only in case, digits, punctuation, accents or white space."""

    does = DataStep(target="llmrecipes.data.steps.copies:Duplicates", takes_markup=True, compares=True, revision=2)
    type: Literal["duplicates"]
    span_sentences: PosInt | None = None
    """Also drop documents made of spans of this many sentences that occur in kept documents; C4 uses 3. Unset: whole
    documents only."""
    max_repeated_spans: Annotated[Probability, OnlyWith("span_sentences")] = 0.5
    """With `span_sentences`: drop documents with a larger share of such spans."""
    cut_spans: Annotated[bool, OnlyWith("span_sentences")] = False
    """With `span_sentences`: cut such spans out of documents instead of dropping them, as C4 does."""
    min_words: Annotated[PosInt, OnlyWith("cut_spans")] = 50
    """With `cut_spans`: drop documents with fewer words left."""


class NearDuplicatesStep(StepSection):
    """Drop documents that are nearly equal to an earlier one (MinHash); no copy of a training text is then held out."""

    does = DataStep(
        target="llmrecipes.data.steps.copies:NearDuplicates",
        takes_markup=True,
        compares=True,
        revision=2,
        extra="corpora",
        package="rensa",
    )
    type: Literal["near_duplicates"]
    threshold: Annotated[float, Field(ge=0.1, lt=1)] = 0.8
    """Fraction of shingles that two documents share (Jaccard similarity) above which the later one is dropped."""
    permutations: Annotated[int, Field(ge=16, le=1024)] = 128
    """Hash values per signature; more are more accurate."""
    shingle_words: PosInt = 5
    """Words per shingle."""


class NoiseStep(StepSection):
    """Replace words of training documents."""

    does = DataStep(target="llmrecipes.data.steps.steps:noise", takes_markup=True, augments=True, revision=2)
    type: Literal["noise"]
    noise_rate: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Fraction of words to replace."""
    replacement: Literal["blank", "unigram"] = "blank"
    """Replace words by `_` (`blank`), or by words of the same document, drawn by frequency (`unigram`)."""
    seed: NonNegInt = 1234
    """Seed that, with the text of the document, selects the words."""


class BalanceStep(StepSection):
    """Draw from sources by the number of tokens kept from them."""

    does = DataStep(target="llmrecipes.data.steps.balance:balanced", takes_markup=True, weighs=True)
    type: Literal["balance"]
    temperature: Annotated[float, Field(ge=1)] = 1.0
    """Draw from sources in proportion to weight × tokens^(1/temperature); 1: by tokens."""
    max_epochs: PosFloat = 4.0
    """Most passes over a source; the other sources are drawn from more often instead."""


Step = Annotated[
    HtmlStep
    | UnicodeStep
    | LengthStep
    | LanguageStep
    | GopherStep
    | RepetitionStep
    | C4Step
    | FineWebStep
    | CodeStep
    | ClassifierStep
    | PersonalDataStep
    | DecontaminateStep
    | DuplicatesStep
    | NearDuplicatesStep
    | NoiseStep
    | BalanceStep,
    Field(
        discriminator="type",
        description="A cleaning step. Steps are applied in order; documents that they drop are counted, with samples "
        "in the prepared data.",
    ),
]
Steps = Annotated[tuple[Step, ...], Field(strict=False)]
