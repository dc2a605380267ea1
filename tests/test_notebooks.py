"""Every notebook runs top to bottom on a sweep's records, is stored without outputs and imports the report only."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from fake_sweep import grid, write_sweep

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs") / "curves"
    arms = grid(clip=["sym", "asym"], tis=["on", "off"])
    write_sweep(folder, arms, range(3), lambda arm, seed, step: 0.3 + 0.6 * step / 40 + 0.01 * seed)
    return folder


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs(path: Path, sweep: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ABLATE_SWEEP", str(sweep))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    pictures = [o for c in notebook.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert pictures
    assert not [o for c in notebook.cells for o in c.get("outputs", []) if o.get("name") == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_is_stored_clean(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert not [c for c in cells if c.get("outputs") or c.get("execution_count")]
    imported = re.findall(
        r"^\s*(?:from|import) ([\w.]+)", "\n".join(c.source for c in cells if c.cell_type == "code"), re.M
    )
    assert {name.split(".")[0] for name in imported} <= {"ablate"}
    assert all(name.startswith("ablate.report") for name in imported)
