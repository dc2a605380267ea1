"""Every command in the docs runs, every link leads somewhere, and the docs' tables name what exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ablate.cli import main
from ablate.compose import Composer
from ablate.plan import make_plan

ROOT = Path(__file__).resolve().parents[1]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCES = [
    (path, line.split("  #")[0].strip())
    for path in DOCS
    for block in re.findall(r"```bash\n(.*?)```", path.read_text(), re.S)
    for line in block.splitlines()
    if line.strip() and not line.strip().startswith("#")
]
INLINE = [
    (path, code)
    for path in DOCS
    for code in re.findall(r"`((?:python -m ablate\.run|ablate plan|make) [^`]*)`", path.read_text())
]
COMMANDS = sorted({(path.name, command) for path, command in FENCES + INLINE})


@pytest.mark.parametrize(("document", "command"), COMMANDS, ids=[f"{d}: {c}" for d, c in COMMANDS])
def test_a_command_of_the_docs_is_right(
    composer: Composer, capsys: pytest.CaptureFixture[str], document: str, command: str
) -> None:
    """Training commands are planned here and run by tests/test_sweep.py; the others run as they stand."""
    words = shlex.split(command)
    if words[0] == "make":
        subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, check=True, capture_output=True)
    elif words[:3] == ["python", "-m", "ablate.run"]:
        arguments = [w for w in words[3:] if w != "-m"]
        if "--help" in arguments or "--cfg" in arguments:
            subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True)
        else:
            assert make_plan(composer, arguments).runs
    elif words[0] == "ablate":
        if words[1] == "plan":
            assert main(words[1:]) == (1 if "+sweep=symclip_series" in words else 0)
        else:  # needs a trained sweep: the options must parse, tests/test_sweep.py runs it
            from ablate.cli import parser

            assert parser().parse_args(words[1:])
    elif words[0] == "pip":
        assert words == ["pip", "install", "-e", "."]
    else:
        assert words[0] in (".venv/bin/pre-commit",), f"{document}: no test knows how to check {command!r}"


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), f"{path.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def test_every_level_is_in_the_docs(composer: Composer) -> None:
    text = (ROOT / "docs" / "factors.md").read_text()
    for group in ("clip", "reduction", "tis", "advantage", "kl"):
        for level in composer.options(group):
            assert f"`{level}`" in text, f"{group}={level} is not in docs/factors.md"


def test_the_yaml_shown_in_the_readme_is_the_file() -> None:
    shown = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert shown is not None
    assert shown[1] == (ROOT / "conf" / "clip" / "asym.yaml").read_text()
