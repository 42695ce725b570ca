"""Tests of the tool that runs the peers' own tests."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from tools import peer_tests


def test_checks_that_an_installed_trl_lacks_are_added(tmp_path: Path) -> None:
    """Imports in one line and in several, in folders below, and only of this module."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "testing_utils.py").write_text(
        "from trl.import_utils import (\n    is_json_available,\n    is_no_such_package_available,\n"
        "    is_there_available,\n)\n"
        "from other.import_utils import is_of_another_available\n"
    )
    (tmp_path / "deep" / "test_a.py").write_text("from trl.import_utils import is_csv_available\n")
    module = ModuleType("trl.import_utils")
    module.is_there_available = lambda: True  # type: ignore[attr-defined]
    checks = peer_tests.missing_checks(tmp_path, module)
    assert [*checks] == ["is_csv_available", "is_json_available", "is_no_such_package_available"]
    assert checks["is_json_available"]() and checks["is_csv_available"]("1.0")
    assert not checks["is_no_such_package_available"]()
