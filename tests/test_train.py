"""One run with real parts: what is exported, how many ranks trained it and whether it was killed must not matter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ablate.record import attempts, read_lines, read_metrics

pytestmark = pytest.mark.slow

SHORT = [
    "train.max_steps=4",
    "train.prompts_per_step=6",
    "eval.interval=2",
    "eval.prompts=16",
    "export.interval=2",
    "checkpoint.interval=2",
]


def start(folder: Path, name: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ablate.run", f"sweep.name={name}", *SHORT, *arguments]
    return subprocess.Popen(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finished(folder: Path, name: str, *arguments: str, code: int = 0) -> Path:
    process = start(folder, name, *arguments)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == code, output
    return folder / "outputs" / name / "base" / "seed=0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


ARMS = """
arms:
  whole: {rollout.precision: fp32}
  split: {rollout.precision: fp32, engine.micro_batch_size: 5}
  early: {rollout.precision: fp32, tis.renormalize: true}
  k2: {kl: k2}
  k3: {kl: k3}
  k1: {kl: k1_in_reward}
"""


@pytest.fixture(scope="module")
def arms(folder: Path) -> dict[str, Path]:
    """Six short runs of one sweep, by arm."""
    (folder / "own" / "sweep").mkdir(parents=True)
    (folder / "own" / "sweep" / "variants.yaml").write_text(ARMS)
    finished(
        folder,
        "variants",
        "+sweep=variants",
        "--config-dir",
        "own",
        "validity.allow=[inert-tis,aliased-arms,confounded-arms]",
    )
    return {run.parent.name: run for run in (folder / "outputs" / "variants").glob("*/seed=0")}


@pytest.fixture(scope="module")
def whole(arms: dict[str, Path]) -> Path:
    return arms["whole"]


def test_an_export_scores_as_the_trainer_did(whole: Path) -> None:
    """The sampler is within 1e-5 of the trainer (recorded) and the export within 1e-5 of the sampler."""
    model = AutoModelForCausalLM.from_pretrained(whole / "export" / "step_2", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(whole / "export" / "step_2")
    drawn = [r for r in pq.read_table(whole / "rollouts" / "000003-000004.parquet").to_pylist() if r["step"] == 3]
    assert len(drawn) == 48
    for row in drawn:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0], -1)
        start = len(row["prompt_ids"])
        found = [float(logprobs[start - 1 + t, token]) for t, token in enumerate(row["response_ids"])]
        assert found == pytest.approx(row["logprobs"], abs=1e-5)
        assert tokenizer.decode(row["response_ids"], skip_special_tokens=True).replace(" ", "") == row["response"]
    rows = read_metrics(whole)
    assert rows[3]["mismatch/abs_log_rho_mean"] < 1e-5
    assert rows[2]["weights_hash"] != rows[4]["weights_hash"]
    assert rows[1]["weights_hash"] is None


def test_two_ranks_train_what_one_trains(folder: Path, whole: Path) -> None:
    two = finished(folder, "two", "rollout.precision=fp32", "cluster.ranks_per_node=2")
    for one_rank, two_ranks in zip(read_metrics(whole), read_metrics(two), strict=True):
        assert one_rank["reward/mean"] == two_ranks["reward/mean"]
        assert one_rank["prompts_hash"] == two_ranks["prompts_hash"]
        for a, b in zip(one_rank["updates"] or [], two_ranks["updates"] or [], strict=True):
            for key in ("loss/total", "optim/grad_norm", "entropy/mean", "ratio/max", "reduction/denominator"):
                assert a[key] == pytest.approx(b[key], rel=2e-4, abs=1e-6), key
    assert (two / "logs" / "attempt-1.rank1.log").is_file()


def test_micro_batches_do_not_change_the_loss(arms: dict[str, Path]) -> None:
    a, b = read_metrics(arms["whole"])[1], read_metrics(arms["split"])[1]
    for x, y in zip(a["updates"], b["updates"], strict=True):
        for key in ("loss/total", "optim/grad_norm", "entropy/mean"):
            assert x[key] == pytest.approx(y[key], rel=1e-5, abs=1e-7), key


def test_old_log_probabilities_known_early_change_nothing(arms: dict[str, Path]) -> None:
    """`renormalize` makes the trainer score all rollouts before the first update instead of during it."""
    for a, b in zip(read_metrics(arms["whole"])[1:], read_metrics(arms["early"])[1:], strict=True):
        assert [u["optim/grad_norm"] for u in a["updates"]] == pytest.approx(
            [u["optim/grad_norm"] for u in b["updates"]], rel=1e-4
        )


@pytest.mark.parametrize("level", ["k1", "k2", "k3"])
def test_a_kl_level_has_a_reference_and_starts_from_it(arms: dict[str, Path], level: str) -> None:
    first, second = read_metrics(arms[level])[1:3]
    # before the first update the policy is its own reference
    assert first["updates"][0]["kl/mean"] == pytest.approx(0.0, abs=1e-6)
    assert abs(second["updates"][1]["kl/mean"]) > 1e-5


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    machine = ("time/", "memory/")
    return {k: v for k, v in row.items() if k not in ("attempt", "job", "time") and not k.startswith(machine)}


def test_a_killed_run_goes_on_to_the_same_numbers(folder: Path, whole: Path) -> None:
    process = start(folder, "killed", "rollout.precision=fp32")
    run = folder / "outputs" / "killed" / "base" / "seed=0"
    deadline = time.monotonic() + 120
    while not (run / "checkpoints" / "step_2" / "complete").is_file():
        assert time.monotonic() < deadline, "no checkpoint came"
        time.sleep(0.02)
    os.kill(json.loads((run / "lock").read_text())["pid"], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, output
    assert "the process killed by SIGKILL" in output
    resumed = finished(folder, "killed", "rollout.precision=fp32")
    assert [a["outcome"] for a in attempts(resumed)] == ["failed", "done"]
    assert [comparable(r) for r in read_metrics(resumed)] == [comparable(r) for r in read_metrics(whole)]
    hashes = [(p / "export" / "step_4" / "model.safetensors").read_bytes() for p in (whole, resumed)]
    assert hashes[0] == hashes[1]
    assert max(r["attempt"] for r in read_lines(resumed / "metrics.jsonl").rows) == 2


def test_a_stop_signal_saves_and_leaves_work(folder: Path) -> None:
    process = start(folder, "stopped", "train.max_steps=400")
    run = folder / "outputs" / "stopped" / "base" / "seed=0"
    deadline = time.monotonic() + 120
    while len(read_lines(run / "metrics.jsonl").rows) < 4:
        assert time.monotonic() < deadline, "no steps came"
        time.sleep(0.05)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 4, output
    assert "(goes on: skips what is done, continues or retries the rest)" in output
    last = attempts(run)[-1]
    assert last["outcome"] == "stopped"
    assert (run / "checkpoints" / f"step_{last['last_step']}" / "complete").is_file()
