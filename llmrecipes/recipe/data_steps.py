"""The steps of `data.steps`: their keys, and the registry of their types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from llmrecipes.recipe.plugins import DataStep
from llmrecipes.recipe.section import NonNegInt, PosFloat, PosInt, Section

NAMESPACE = "llmrecipes.data"
STEPS: dict[str, DataStep] = {
    "html": DataStep(
        target=f"{NAMESPACE}.cleaning:html",
        takes_markup=True,
        takes={"main_content": True},
        revision=2,
        extra="corpora",
        package="resiliparse",
    ),
    "unicode": DataStep(
        target=f"{NAMESPACE}.cleaning:unicode",
        takes_markup=True,
        takes={"unescape_html": False},
        extra="corpora",
        package="ftfy",
    ),
    "length": DataStep(
        target=f"{NAMESPACE}.steps:length", takes_markup=True, takes={"min_characters": None, "max_characters": None}
    ),
    "language": DataStep(
        target=f"{NAMESPACE}.quality:language",
        takes={"languages": None, "min_probability": 0.5},
        revision=2,
        extra="corpora",
        package="py3langid",
    ),
    "gopher": DataStep(target=f"{NAMESPACE}.quality:gopher", takes={"min_words": 50, "max_words": 100_000}),
    "repetition": DataStep(target=f"{NAMESPACE}.quality:repetition"),
    "c4": DataStep(
        target=f"{NAMESPACE}.quality:c4", takes={"terminal_punctuation": True, "min_sentences": 5}, revision=2
    ),
    "fineweb": DataStep(target=f"{NAMESPACE}.quality:fineweb", revision=2),
    "code": DataStep(target=f"{NAMESPACE}.quality:code", takes={"max_line_length": 1000, "max_mean_line_length": 100}),
    "classifier": DataStep(
        target=f"{NAMESPACE}.quality:classifier",
        takes={"model": None, "labels": None, "min_probability": 0.5},
        extra="corpora",
        package="fasttext",
    ),
    "personal_data": DataStep(target=f"{NAMESPACE}.cleaning:personal_data", takes_markup=True, revision=2),
    "decontaminate": DataStep(
        target=f"{NAMESPACE}.contamination:decontaminate",
        takes_markup=True,
        takes={"paths": None, "tasks": None, "ngram_words": 13},
        revision=2,
    ),
    "duplicates": DataStep(
        target=f"{NAMESPACE}.copies:Duplicates",
        takes_markup=True,
        takes={"span_sentences": None, "max_repeated_spans": 0.5, "cut_spans": False, "min_words": 50},
        compares=True,
        revision=2,
    ),
    "near_duplicates": DataStep(
        target=f"{NAMESPACE}.copies:NearDuplicates",
        takes_markup=True,
        takes={"threshold": 0.8, "permutations": 128, "shingle_words": 5},
        compares=True,
        revision=2,
        extra="corpora",
        package="rensa",
    ),
    "noise": DataStep(
        target=f"{NAMESPACE}.steps:noise",
        takes_markup=True,
        takes={"noise_rate": 0.1, "replacement": "blank", "seed": 1234},
        augments=True,
        revision=2,
    ),
    "balance": DataStep(
        target=f"{NAMESPACE}.balance:balanced",
        takes_markup=True,
        takes={"temperature": 1.0, "max_epochs": 4.0},
        weighs=True,
    ),
}
"""What `data.steps[].type` may be. A step that compares documents comes after those that look at one."""
REQUIRED = {"language": ("languages",), "classifier": ("model", "labels")}
"""The keys that a type does not work without."""
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
    """A cleaning step. Steps are applied in order; documents that they drop are counted, with samples in the prepared
    data."""

    type: Literal[
        "html",
        "unicode",
        "length",
        "language",
        "gopher",
        "repetition",
        "c4",
        "fineweb",
        "code",
        "classifier",
        "personal_data",
        "decontaminate",
        "duplicates",
        "near_duplicates",
        "noise",
        "balance",
    ]
    """`html`: extract the text of documents that are web pages. `unicode`: repair text that was decoded wrongly (ftfy).
    `length`: limit the number of characters. `language`: drop documents in other languages. `gopher`, `repetition`: the
    quality and repetition rules of Gopher. `c4`, `fineweb`: the rules of C4, which also remove lines, and of FineWeb.
    `code`: StarCoder2's rules for source code. `classifier`: keep documents to which a fastText model gives certain
    labels. `personal_data`: mask e-mail addresses and public IP addresses. `decontaminate`: drop documents that share a
    sequence of words with files, such as those of evaluation tasks. `duplicates`: drop documents that differ from an
    earlier one only in case, digits, punctuation, accents or white space. `near_duplicates`: drop documents that are
    nearly equal to an earlier one (MinHash); no copy of a training text is then held out. `noise`: replace words of
    training documents. `balance`: draw from sources by the number of tokens kept from them."""
    main_content: bool | None = None
    """`html`: remove navigation, headers, footers and forms; unset: true."""
    unescape_html: bool | None = None
    """`unicode`: replace HTML entities in texts without `<`, as FineWeb does; unset: false."""
    min_characters: PosInt | None = None
    """`length`: drop documents with less text; unset: no minimum."""
    max_characters: PosInt | None = None
    """`length`: drop documents with more text; unset: no maximum."""
    languages: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    """`language`: languages to keep, as ISO 639 codes such as `[en, de]`; `zh`, `ar`, `ku`, `lv`, `no` and `uz` stand
    for their varieties too (Wu, Cantonese, …)."""
    min_probability: Annotated[float | None, Field(ge=0, lt=1)] = None
    """Minimum probability that a document has one of the languages (`language`) or labels (`classifier`), together;
    others are dropped; unset: 0.5."""
    min_words: PosInt | None = None
    """`gopher`: drop documents with fewer words. `duplicates` with `cut_spans`: drop documents with fewer words left.
    Unset: 50."""
    max_words: PosInt | None = None
    """`gopher`: drop documents with more words; unset: 100,000."""
    terminal_punctuation: bool | None = None
    """`c4`: remove lines that do not end with a punctuation mark; unset: true. FineWeb sets it to false."""
    min_sentences: PosInt | None = None
    """`c4`: drop documents with fewer sentences in the remaining lines; unset: 5."""
    max_line_length: PosInt | None = None
    """`code`: drop files with a longer line, in characters; unset: 1,000."""
    max_mean_line_length: PosInt | None = None
    """`code`: drop files whose lines are longer on average; unset: 100."""
    model: str | None = None
    """`classifier`: file of a supervised fastText model, `.bin` or `.ftz`, relative to the working directory."""
    labels: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    """`classifier`: labels of the documents to keep, without `__label__`."""
    paths: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    """`decontaminate`: files or globs of text, JSON lines or Parquet, samples logged by lm-evaluation-harness, or YAML
    files of its tasks whose data are local files; relative to the working directory."""
    tasks: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    """`decontaminate`: names of tasks, groups or tags of lm-evaluation-harness (extra eval), whose data are local files
    or in the Hub's cache on this machine."""
    ngram_words: Annotated[int | None, Field(ge=4)] = None
    """`decontaminate`: words in a shared sequence; unset: 13."""
    span_sentences: PosInt | None = None
    """`duplicates`: also drop documents made of spans of this many sentences that occur in kept documents; C4 uses 3.
    Unset: compare whole documents only."""
    max_repeated_spans: Annotated[float | None, Field(ge=0, lt=1)] = None
    """`duplicates` with `span_sentences`: drop documents with a larger share of such spans; unset: 0.5."""
    cut_spans: bool | None = None
    """`duplicates` with `span_sentences`: cut such spans out of documents instead of dropping them, as C4 does; unset:
    false."""
    threshold: Annotated[float | None, Field(ge=0.1, lt=1)] = None
    """`near_duplicates`: fraction of shingles that two documents share (Jaccard similarity) above which the later one
    is dropped; unset: 0.8."""
    permutations: Annotated[int | None, Field(ge=16, le=1024)] = None
    """`near_duplicates`: hash values per signature; more are more accurate; unset: 128."""
    shingle_words: PosInt | None = None
    """`near_duplicates`: words per shingle; unset: 5."""
    noise_rate: Annotated[float | None, Field(gt=0, lt=1)] = None
    """`noise`: fraction of words to replace; unset: 0.1."""
    replacement: Literal["blank", "unigram"] | None = None
    """`noise`: replace words by `_` (`blank`), or by words of the same document, drawn by frequency (`unigram`); unset:
    blank."""
    seed: NonNegInt | None = None
    """`noise`: seed that, with the text of the document, selects the words; unset: 1234."""
    temperature: Annotated[float | None, Field(ge=1)] = None
    """`balance`: draw from sources in proportion to weight × tokens^(1/temperature); unset: 1, by tokens."""
    max_epochs: PosFloat | None = None
    """`balance`: maximum number of passes over a source in the run; the other sources are drawn from more often
    instead. Unset: 4."""

    @property
    def settings(self) -> dict[str, Any]:
        """The values of its type's keys, with defaults."""
        values = self.model_dump(mode="json")
        return {key: default if values[key] is None else values[key] for key, default in STEPS[self.type].takes.items()}


Steps = Annotated[tuple[Step, ...], Field(strict=False)]
