"""The frozen base: built once, the same wherever it is built, never half there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ablate import base as module
from ablate.base import base_digest, prepare_base, warmup_accuracy
from ablate.config import Model as ModelConfig
from ablate.config import Task as TaskConfig
from ablate.errors import UsageError

TASK = TaskConfig(name="reverse", train_size=500, heldout_size=40, reward="binary", min_digits=2, max_digits=2)
MODEL = ModelConfig(
    kind="tiny", hidden_size=32, intermediate_size=64, layers=2, heads=4, kv_heads=2, head_dim=32, warmup_steps=4
)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_built_once_deterministic_and_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = prepare_base(MODEL, TASK, tmp_path / "a")
    torch.manual_seed(1234)
    before = torch.random.get_rng_state()
    assert weights(prepare_base(MODEL, TASK, tmp_path / "b")) == weights(folder)
    assert torch.equal(torch.random.get_rng_state(), before)
    monkeypatch.setattr(module, "_build", lambda *_: pytest.fail("built again"))
    assert prepare_base(MODEL, TASK, tmp_path / "a") == folder
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == len(AutoTokenizer.from_pretrained(folder))
    assert 0 <= warmup_accuracy(folder) <= 1


def test_warming_up_teaches_the_task(tmp_path: Path) -> None:
    longer = MODEL.model_copy(update={"warmup_steps": 120, "warmup_batch": 32, "hidden_size": 64})
    before = warmup_accuracy(prepare_base(MODEL.model_copy(update={"warmup_steps": 0}), TASK, tmp_path))
    assert warmup_accuracy(prepare_base(longer.model_copy(update={"warmup_steps": 200}), TASK, tmp_path)) > before + 0.3


@pytest.mark.parametrize("change", [{"warmup_seed": 1}, {"warmup_steps": 5}, {"hidden_size": 48}])
def test_another_model_is_another_base(change: dict[str, int]) -> None:
    assert base_digest(MODEL, TASK) != base_digest(MODEL.model_copy(update=change), TASK)


def test_what_is_evaluated_does_not_change_the_base() -> None:
    assert base_digest(MODEL, TASK) == base_digest(MODEL, TASK.model_copy(update={"heldout_size": 7}))
    assert base_digest(MODEL, TASK) != base_digest(MODEL, TASK.model_copy(update={"train_size": 501}))


def test_the_loser_of_a_race_keeps_the_winners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prepare_base(MODEL, TASK, tmp_path)
    won = weights(folder)
    monkeypatch.setattr(Path, "is_dir", lambda self: self != folder or len(list(tmp_path.rglob(".*.*"))) > 0)
    assert prepare_base(MODEL, TASK, tmp_path) == folder
    monkeypatch.undo()
    assert weights(folder) == won
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_flush", fails)
    with pytest.raises(OSError, match="No space"):
        prepare_base(MODEL, TASK, tmp_path)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_a_found_base_imports_no_torch(tmp_path: Path) -> None:
    prepare_base(MODEL, TASK, tmp_path)
    script = (
        "import sys; from pathlib import Path; from ablate.base import prepare_base\n"
        "from ablate.config import Model, Task\n"
        f"prepare_base(Model(**{MODEL.model_dump()!r}), Task(**{TASK.model_dump()!r}), Path({str(tmp_path)!r}))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_pretrained_base_must_be_a_model_folder(tmp_path: Path) -> None:
    pretrained = ModelConfig(kind="pretrained", path=str(tmp_path))
    with pytest.raises(UsageError, match=r"config\.json does not exist"):
        prepare_base(pretrained, TASK, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert prepare_base(pretrained, TASK, tmp_path / "unused") == tmp_path
    with pytest.raises(UsageError, match=r"model\.path"):
        prepare_base(ModelConfig(kind="pretrained"), TASK, tmp_path)


def test_an_incomplete_tiny_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model\.layers, model\.heads"):
        prepare_base(MODEL.model_copy(update={"layers": None, "heads": None}), TASK, tmp_path)
