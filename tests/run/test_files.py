"""Files are written completely or not at all, and only where they belong."""

import os
import stat
from pathlib import Path

import pytest


def test_a_link_where_a_temporary_file_was_expected_leads_nowhere(
    project: Path, tmp_path: Path
) -> None:
    """In a folder that many may write to, a link may lie under any name that can be guessed."""
    from demo.engine.filesystem import write_atomically

    target = tmp_path / "another file"
    target.write_text("as it was")
    for name in ("status.json.tmp", f"status.json.{os.getpid()}.tmp"):
        (tmp_path / name).symlink_to(target)
    write_atomically(tmp_path / "status.json", "new")
    assert target.read_text() == "as it was"
    assert (tmp_path / "status.json").read_text() == "new"
    assert not (tmp_path / "status.json").is_symlink()


def test_a_name_that_was_guessed_is_refused(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from demo.engine import filesystem

    monkeypatch.setattr(filesystem.secrets, "token_hex", lambda _: "guessed")
    target = tmp_path / "another file"
    target.write_text("as it was")
    (tmp_path / "status.json.guessed.tmp").symlink_to(target)
    with pytest.raises(FileExistsError):
        filesystem.write_atomically(tmp_path / "status.json", "new")
    assert target.read_text() == "as it was"


def test_others_may_read_what_the_umask_lets_them(project: Path, tmp_path: Path) -> None:
    from demo.engine.filesystem import write_atomically

    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "file", b"bytes")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_what_could_not_be_written_leaves_nothing(project: Path, tmp_path: Path) -> None:
    from demo.engine.filesystem import write_atomically

    def fail(_file: object) -> None:
        raise OSError("no room")

    (tmp_path / "file").write_text("as it was")
    with pytest.raises(OSError, match="no room"):
        write_atomically(tmp_path / "file", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "as it was"
