"""What doctor says of real drives."""

from __future__ import annotations

from pathlib import Path

from support.drive_kinds import small_ext4

from tierstream.tools import checks


def test_a_full_drive_is_a_warning(tmp_path: Path) -> None:
    with small_ext4(tmp_path, 32 << 20) as drive:
        check = checks.directory_check(1, str(drive))
    assert check.status is checks.Status.WARNING
    assert "hardly any space is left" in check.remedy
