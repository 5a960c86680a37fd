"""The recipes of published corpora run on a small corpus, and each of their steps drops or changes what it is for."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from llmrecipes.data.folder.documents import documents
from llmrecipes.data.prepare import prepare
from llmrecipes.data.steps.split import SPLITS
from llmrecipes.recipe.load import load
from tests.helpers import ROOT

_WORDS = """
about above after again air all along also always another answer any around ask away back because been before began
begin being below between book both boy build but call came can change children city close come country cut day
different does down each earth eat end enough even every example eye face family far father feet few find first follow
food found four girl give good great group grow hand hard head hear help here high home house idea important just keep
kind know land large last later learn leave left letter life light line list little live long made make man many mean
might mile more most mother mountain move much must name near need never next night number often old once only open
other our own page paper part people picture place plant play point put question quick read real right river run said
same saw school sea second see seem sentence set she should show side small some something song soon sound still stop
story study such take talk tell their them then there these they thing think this thought three through time together
too took tree turn two under until use very walk want watch water way went were what when where which while white who
why will without word work world would write year young your
"""


def _prose(seed: int, paragraphs: int = 5) -> str:
    draw = random.Random(seed)

    def sentence() -> str:
        words = ["the", *draw.sample(_WORDS.split(), 9), "of", "the", draw.choice(_WORDS.split())]
        return " ".join(words).capitalize() + "."

    return "\n".join(f"{sentence()} {sentence()} {sentence()}" for _ in range(paragraphs))


PLANTED = {
    "language": "Der Ausschuss hat am Dienstag über den Haushalt des nächsten Jahres beraten. " * 3
    + "Die meisten Mitglieder waren mit dem Vorschlag einverstanden, und niemand hat etwas anderes erwartet.",
    "repetition": "\n".join([_prose(901, 1)] * 6),
    "gopher": "The boat is at the pier and we have it. " + _prose(902, 1)[:100],
    "c4": _prose(903) + "\nThe function f has the body { return and is of the kind that you have seen.",
    "fineweb": "\n".join(line.replace(".", "") for line in _prose(904, 12).splitlines()),
    "near_duplicates": _prose(1).replace("Th", "th", 1).replace("river", "rivers"),
}
MAIL = _prose(905) + "\nWrite to someone.else@university.edu if you want to know more of the same."


@pytest.mark.parametrize(
    ("name", "dropping"),
    [
        ("fineweb", dict.fromkeys(("language", "repetition", "gopher", "c4", "fineweb", "near_duplicates"), 1)),
        ("dolma", {"language": 1, "gopher": 1, "repetition": 1, "c4": 2}),  # lines without punctuation too
    ],
)
def test_the_recipe_of_a_published_corpus(name: str, dropping: dict[str, int], tmp_path: Path) -> None:
    key = "html" if name == "fineweb" else "text"
    repeated = _prose(2).splitlines()[0]
    rows = [_prose(seed) for seed in range(40)] + list(PLANTED.values()) + [MAIL, f"{_prose(906)}\n{repeated}"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({key: row}) + "\n" for row in rows))
    file = str(ROOT / "recipes" / "data" / f"{name}.yaml")
    assert load(file).recipe.data.tokenizer.type == "huggingface"
    small = [
        "train.train_iters=4",
        "train.global_batch_size=8",
        "scheduler.lr_warmup_iters=1",
        "scheduler.lr_decay_iters=4",
    ]
    source = f"data.sources=[{{type: jsonl, path: {tmp_path}/rows.jsonl, text_key: {key}}}]"
    used = load(
        file, [*small, "model.vocab_size=400", "model.seq_length=32", "data.tokenizer={type: bpe}", source]
    ).recipe
    made = prepare(used, tmp_path / "data", workers=1)
    [record] = made.manifest.sources
    assert {step: count for step, count in record.steps.items() if count} == dropping
    assert record.changed["personal_data"] == 1
    tokenizer = made.tokenizer()
    texts = [tokenizer.decode(ids) for split in SPLITS for ids in documents(made, split)]
    assert sum("|||EMAIL_ADDRESS|||" in text for text in texts) == 1
    if name == "dolma":
        assert sum(repeated in text for text in texts) == 1 and record.changed["duplicates"] >= 1
