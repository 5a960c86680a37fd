"""The manifest notices every change of itself."""

from __future__ import annotations

import pytest

from llmrecipes.checkpoint.manifest import CheckpointInfo, FileRecord, Manifest, build, dump, parse

INFO = CheckpointInfo(
    step=120,
    consumed_samples=960,
    consumed_tokens=61440,
    layout={"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2, "world_size": 2},
    recipe_hash="0123456789abcdef",
    recipe={"name": "gpt-tiny", "optimizer": {"lr": 0.001, "betas": [0.9, 0.95]}, "data": {"split": None}, "é": "ü"},
)


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    files = {f"__{rank}_0.distcp": FileRecord(size=1000 + rank, sha256=f"{rank:064x}") for rank in range(2)}
    return build(INFO, {"torch": "2.13.0"}, files)


def test_a_manifest_is_read_as_it_was_written(manifest: Manifest) -> None:
    assert parse(dump(manifest)) == manifest


def test_every_changed_bit_is_noticed(manifest: Manifest) -> None:
    text = dump(manifest)
    for place in range(len(text)):
        for bit in range(8):
            changed = bytearray(text)
            changed[place] ^= 1 << bit
            with pytest.raises(ValueError):
                parse(bytes(changed))


def test_every_other_digit_letter_and_space_is_noticed(manifest: Manifest) -> None:
    text = dump(manifest)
    for place in range(len(text)):
        for other in b'0123456789abcdef"{}[],: \n':
            if other != text[place]:
                with pytest.raises(ValueError):
                    parse(text[:place] + bytes([other]) + text[place + 1 :])


def test_every_lost_and_added_byte_is_noticed(manifest: Manifest) -> None:
    text = dump(manifest)
    for place in range(len(text)):
        for changed in (text[:place], text[:place] + text[place + 1 :], text[:place] + b" " + text[place:]):
            with pytest.raises(ValueError):
                parse(changed)
    with pytest.raises(ValueError):
        parse(text + b"\n")


def test_older_manifests_have_no_digest_and_newer_ones_need_theirs(manifest: Manifest) -> None:
    older = manifest.model_copy(update={"format": 1})
    assert parse(older.model_dump_json(indent=1, exclude={"recipe"}).encode()).format == 1
    with pytest.raises(ValueError, match="SHA-256 is missing"):
        parse(manifest.model_dump_json(indent=1).encode())
