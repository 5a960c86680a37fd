"""What cleaning is worth: gpt-tiny on a corpus with planted junk and copies, cleaned by `data.steps` and not.

    python -m benchmarks.cleaning FOLDER [--seeds 1234 1 2] [--steps 640] [--json FILE]

Originals are the documents of `machine` that the steps of recipes/gpt-tiny-clean.yaml keep. One in twenty is held out
before anything is planted. To the others are added: after one in three an equal copy, after one in three a copy with
other words in 1 of 150 places, and after every one, with probability a half, junk of about its size: offers, menus,
German and encoded data. The corpus is trained on as it is, cleaned by these steps, and without what was planted, for
the same number of tokens; each way trains its tokenizer on its text. Figures are bits per byte of the held-out text.
"""

from __future__ import annotations

import base64
import json
import random
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, close, machine, parser, show
from llmrecipes.data.sources.sources import documents
from llmrecipes.data.steps.steps import Seen, pipeline, step_spec
from llmrecipes.recipe.load import load

RECIPE = "gpt-tiny-clean"
WAYS = ("planted", "cleaned", "originals")
HELD_OUT = 20
"""One in so many originals is held out."""
_GERMAN = (
    "der die das und ist nicht ein eine für mit auf von wird werden kann diese dieser Datei Programm Zeile Seite "
    "Haus Straße heute morgen immer schnell langsam oder aber weil wenn sondern durch gegen ohne über unter zwischen"
)
_OFFERS = "buy cheap best watches now click here win free bonus casino price today offer limited order"
_MENU = "Home Products Prices About Contact Login Register Cart Help Terms Privacy Cookies Search News"


def junk(size: int, rng: random.Random) -> str:
    """About so many characters of one of four kinds."""
    kind = rng.randrange(4)
    if kind == 0:
        words = rng.choices(_OFFERS.split(), k=size // 6)
        return " ".join(" ".join(words[k : k + 7]).capitalize() + "!" for k in range(0, len(words), 7))
    if kind == 1:
        return "\n".join(rng.choices(_MENU.split(), k=size // 7))
    if kind == 2:
        words = rng.choices(_GERMAN.split(), k=size // 6)
        return " ".join(" ".join(words[k : k + 9]).capitalize() + "." for k in range(0, len(words), 9))
    return base64.encodebytes(rng.randbytes(size * 3 // 4)).decode()


def near_copy(text: str, rng: random.Random) -> str:
    """The text with other words in 1 of 150 places."""
    words = text.split(" ")
    for place in range(rng.randrange(150), len(words), 150):
        words[place] = rng.choice(words)
    return " ".join(words)


def plant(originals: list[str], rng: random.Random) -> tuple[list[str], Counter[str]]:
    """The corpus in random order, and its bytes by kind."""
    every = [("original", text) for text in originals]
    every += [("copy", text) for text in originals if rng.random() < 1 / 3]
    every += [("near-copy", near_copy(text, rng)) for text in originals if rng.random() < 1 / 3]
    every += [("junk", junk(len(text), rng)) for text in originals if rng.random() < 1 / 2]
    rng.shuffle(every)
    sizes: Counter[str] = Counter()
    for kind, text in every:
        sizes[kind] += len(text.encode())
    return [text for _, text in every], sizes


def corpora(folder: Path) -> Counter[str]:
    """Write held.jsonl, planted.jsonl and originals.jsonl; bytes of the planted one by kind."""
    data = load(RECIPE).recipe.data
    spec = step_spec(data)
    seen = Seen(spec)
    kept = map(seen.kept, map(pipeline(spec), documents(data.sources[0], None)))
    texts = [each.text.decode() for each in kept if each is not None]
    held, originals = texts[::HELD_OUT], [text for n, text in enumerate(texts) if n % HELD_OUT]
    planted, sizes = plant(originals, random.Random(1))
    for name, every in (("held", held), ("planted", planted), ("originals", originals)):
        rows = (json.dumps({"text": text}) + "\n" for text in every)
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return sizes | Counter(held=sum(len(text.encode()) for text in held))


def trained(folder: Path, way: str, seed: int, steps: int) -> float:
    """Bits per byte of the held-out text after one training."""
    run = f"{way}-{seed}"
    source = "originals" if way == "originals" else "planted"
    changes = [
        f"data.sources=[{{type: jsonl, path: {folder / source}.jsonl}}]",
        f"data.valid_sources=[{{type: jsonl, path: {folder / 'held'}.jsonl, label: clean}}]",
        "data.split=[100, 0, 0]",
        f"train.seed={seed}",
        f"train.train_iters={steps}",
        f"scheduler.lr_decay_iters={steps}",
        *([] if way == "cleaned" else ["data.steps=[]"]),
    ]
    command = [sys.executable, "-m", "llmrecipes.cli", "train", RECIPE, *changes, "--run-id", run, "--no-sample"]
    places = ["--runs-dir", str(folder / "runs"), "--data-dir", str(folder / "data")]
    with (folder / f"{run}.log").open("w") as log:
        subprocess.run([*command, *places], cwd=ROOT, check=True, stdout=log, stderr=log)
    rows = map(json.loads, (folder / "runs" / RECIPE / run / "metrics.jsonl").read_text().splitlines())
    values = [row["valid_source_bits_per_byte"]["clean"] for row in rows if row.get("valid_source_bits_per_byte")]
    return float(values[-1])


def main() -> None:
    """Print a table; a training that has ended is not repeated."""
    arguments = parser(__doc__)
    arguments.add_argument("folder", type=Path, help="keep the corpora, data and runs there")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1234, 1, 2])
    arguments.add_argument("--steps", type=int, default=640, help="of 2,048 tokens")
    options = arguments.parse_args()
    started_on = machine()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "results.json"
    made: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {"bytes": corpora(folder)}
    results.write_text(json.dumps(made, indent=1))
    both = [(way, seed) for seed in options.seeds for way in WAYS[:2]]
    for way, seed in (*both, *((WAYS[2], seed) for seed in options.seeds)):
        if f"{way} {seed}" not in made:
            made[f"{way} {seed}"] = trained(folder, way, seed, options.steps)
            results.write_text(json.dumps(made, indent=1))
    rows = []
    for way in WAYS:
        values = [made[f"{way} {seed}"] for seed in options.seeds]
        rows.append((way, *(f"{value:.4f}" for value in values), f"{statistics.mean(values):.4f}"))
    show("bits per byte of held-out clean text", ("trained on", *map(str, options.seeds), "mean"), rows)
    print(", ".join(f"{kind} {size:,} bytes" for kind, size in made["bytes"].items()))
    close(made, started_on, options.json)


if __name__ == "__main__":
    main()
