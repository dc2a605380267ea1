"""Writes that leave the old content or the new one; locks that tell a live holder from a dead one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ablate import files
from ablate.errors import UsageError


def test_an_unwritable_path_is_one_line_and_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    files.write_text(path, "old")

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(UsageError, match=r"plan\.json: cannot be written \(No space left on device\)"):
        files.write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_file_in_the_place_of_a_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        files.write_text(tmp_path / "outputs" / "x" / "plan.json", "")


def test_a_lock_has_one_live_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with files.locked(path, "sweep s"):
        holder = files.holder_of(path)
        assert holder is not None
        assert holder["pid"] == os.getpid()
        with (
            pytest.raises(UsageError, match=f"sweep s is held by process {os.getpid()} on"),
            files.locked(path, "sweep s"),
        ):
            pass
        assert path.exists()
    assert not path.exists()


def test_a_dead_holder_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import os; from pathlib import Path; from ablate import files\n"
        f"lock = files.locked(Path({str(path)!r}), 'x'); lock.__enter__(); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert path.exists()
    assert files.holder_of(path) is None
    with files.locked(path, "sweep s"):
        assert files.holder_of(path) is not None


def test_a_reused_pid_is_not_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "start": 1, "since": ""}))
    assert files.holder_of(path) is None


def test_a_holder_on_another_host_may_live(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "start": 1, "since": "then"}))
    with pytest.raises(UsageError, match=f"rm '{path}'"), files.locked(path, "run r"):
        pass
