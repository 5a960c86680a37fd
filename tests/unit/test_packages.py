"""Which packages count as installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrecipes.packages import find_spec
from tests.helpers import ROOT


def test_a_folder_with_the_name_of_a_package_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onlyfolder").mkdir()
    (tmp_path / "hascode").mkdir()
    (tmp_path / "hascode/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert find_spec("onlyfolder") is None
    assert find_spec("hascode") is not None
    assert find_spec("json") is not None


def test_all_ask_this_way() -> None:
    asking = [
        path for path in (ROOT / "llmrecipes").rglob("*.py") if "importlib.util import" in path.read_text("utf-8")
    ]
    assert not asking
