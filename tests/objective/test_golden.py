"""Against values made by running public implementations (their ratios pass through float32: 1e-6)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from objective_support import Levels, evaluate, level, some_levels
from torch import Tensor

from ablate.objective import kl, metrics, reduction, surrogate, tis
from ablate.objective.loss import bind_advantage

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text(encoding="utf-8"))
SETS = range(len(GOLDEN["loss"]))
CASES = [(k, n) for k in SETS for n in range(len(GOLDEN["loss"][k]["loss_cases"]))]


def tensor(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def inputs(k: int) -> dict[str, Any]:
    raw = GOLDEN["loss"][k]["inputs"]
    made: dict[str, Any] = {name: tensor(v) for name, v in raw.items() if isinstance(v, list)}
    made["loss_mask"] = made["loss_mask"] > 0
    made["entropy"] = torch.zeros_like(made["logprobs"])
    made["prompts"] = torch.arange(len(made["logprobs"])) // 2
    return made | {"max_response_len": raw["max_seq_len"]}


def levels_of(case: dict[str, Any]) -> Levels:
    chosen = some_levels(reduction=case["reduction"])
    clip: dict[str, Any] = {"name": case["surrogate"]}
    keys = {"clip_low": "clip_low", "clip_high": "clip_high", "dual_clip_c": "dual_clip"}
    keys |= {"tau_pos": "tau_pos", "tau_neg": "tau_neg"}
    clip |= {ours: case[theirs] for theirs, ours in keys.items() if case.get(theirs) is not None}
    if case["tis_cap"] is not None:
        chosen["tis"] = level("tis", "on", cap=case["tis_cap"])
    return chosen | {"clip": clip}


def close(actual: Tensor, expected: list[Any]) -> None:
    torch.testing.assert_close(actual, tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("k", "n"), CASES)
def test_loss_and_gradient(k: int, n: int) -> None:
    case, data = GOLDEN["loss"][k]["loss_cases"][n], inputs(k)
    levels = levels_of(case)
    loss, grad, _ = evaluate(levels, data)
    scale = 1.0
    if levels["reduction"]["name"] == "seq_mean_token_sum_norm_global":
        # the source counts sequences by their advantage alone; ours must also have a loss token
        ours = ((data["advantages"] != 0) & data["loss_mask"]).any(-1).sum().item()
        scale = ours / case["global_num_sequences"]
    assert loss * scale == pytest.approx(case["loss"], abs=1e-6)
    close(grad * scale, case["grad"])


@pytest.mark.parametrize(("k", "n"), CASES)
def test_clip_fraction(k: int, n: int) -> None:
    case, data = GOLDEN["loss"][k]["loss_cases"][n], inputs(k)
    clip = levels_of(case)["clip"]
    function = getattr(surrogate, clip.pop("name"))
    mask = data["loss_mask"]
    log_ratio = data["logprobs"] - data["old_logprobs"]
    found = metrics.clip_metrics(function(data["logprobs"], log_ratio, data["advantages"], mask, **clip), mask)
    assert found["clip/fraction"] == pytest.approx(case["clip_fraction"], abs=1e-6)


@pytest.mark.parametrize("k", SETS)
@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl(k: int, name: str) -> None:
    data = inputs(k)
    value = getattr(kl, name)(data["logprobs"], data["ref_logprobs"])
    close(value * data["loss_mask"], GOLDEN["loss"][k]["kl"][name])


@pytest.mark.parametrize("k", SETS)
@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"])
def test_reduction_weights(k: int, name: str) -> None:
    data = inputs(k)
    mask = data["loss_mask"]
    ours = getattr(reduction, name)(mask, data["prompts"], data["advantages"], data["max_response_len"])
    theirs = tensor(GOLDEN["loss"][k]["reduction_weights"]["weights"][name])
    close(ours, torch.where(mask, theirs, 0.0).tolist())


@pytest.mark.parametrize("k", SETS)
@pytest.mark.parametrize("n", range(6))
def test_off_policy_correction(k: int, n: int) -> None:
    case, data = GOLDEN["loss"][k]["off_policy"][n], inputs(k)
    s, mask = case["settings"], data["loss_mask"]
    difference = data["old_logprobs"] - data["rollout_logprobs"]
    mechanism, keywords = {
        "tis_token": (tis.token, {"cap": s.get("token_tis_ratio_clip_high")}),
        "tis_sequence": (tis.sequence, {"cap": s.get("sequence_tis_ratio_clip_high")}),
        "icepop_token_mask": (tis.icepop, bounds(s, "token_mask_is_threshold_{}")),
        "sequence_mask_geometric": (tis.geometric_mask, bounds(s, "geo_mask_{}")),
        "sequence_mask_product": (tis.product_mask, bounds(s, "product_mask_{}")),
        "outlier_sequence_mask": (tis.outlier_mask, bounds(s, "outlier_token_is_threshold_{}")),
    }[case["name"]]
    weight = mechanism(difference, mask, **keywords)
    close((mask & (weight > 0)).double(), case["mask_after"])
    if case["ratio"] is not None:
        close(torch.where(mask, weight, 0.0), (tensor(case["ratio"]) * mask).tolist())


def bounds(settings: dict[str, float], pattern: str) -> dict[str, float | None]:
    return {side: settings.get(pattern.format(side)) for side in ("low", "high")}


@pytest.mark.parametrize("n", range(len(GOLDEN["advantages"])))
@pytest.mark.parametrize(
    ("column", "ours"),
    [
        ("grpo_std", {"name": "grpo"}),
        ("grpo_no_std", {"name": "grpo_no_std"}),
        ("rloo", {"name": "rloo"}),
        ("rloo_n_min2", {"name": "rloo_n", "min_group_size": 2}),
        ("rloo_n_min4", {"name": "rloo_n", "min_group_size": 4}),
    ],
)
def test_advantages(n: int, column: str, ours: dict[str, Any]) -> None:
    case = GOLDEN["advantages"][n]
    rewards, groups = tensor(case["rewards"]), torch.tensor(case["groups"])
    included = torch.ones_like(groups, dtype=torch.bool)
    if column.startswith("rloo_n"):  # the other columns are without exclusions
        included = ~torch.tensor(case["excluded"])
    # a group of one: the source's GRPO gives A = R, here 0
    expected = [0.0] if len(rewards) == 1 else case[column]
    close(bind_advantage(ours)(rewards, groups, included), expected)
