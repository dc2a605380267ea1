"""The objective once more, in plain Python: nested loops, the math module, gradients derived by hand.

It shares no code and no tensor library with `ablate.objective`. Tensors are lists of lists, a level is what
its YAML file holds, masked positions are never read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

Matrix = list[list[float]]
Level = dict[str, Any]


def hold(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def bounded_exp(x: float) -> float:
    return math.exp(hold(x, -20.0, 20.0))


def surrogate(level: Level, lp: Matrix, old: Matrix, adv: Matrix, mask: list[list[bool]]) -> tuple[Matrix, Matrix]:
    """Per-token loss and its derivative by the token's own log-probability."""
    loss, slope = zeros(mask), zeros(mask)
    for i, row in enumerate(mask):
        tokens = [t for t, m in enumerate(row) if m]
        mean = sum(lp[i][t] - old[i][t] for t in tokens) / max(len(tokens), 1)
        for t in tokens:
            difference = mean if level["name"] == "gspo" else lp[i][t] - old[i][t]
            loss[i][t], slope[i][t] = _one(level, difference, lp[i][t], adv[i][t])
    return loss, slope


def _one(level: Level, difference: float, lp: float, a: float) -> tuple[float, float]:
    name = level["name"]
    if name == "gspo":
        ratio, moving = math.exp(min(difference, 10.0)), difference <= 10.0
    else:
        ratio, moving = bounded_exp(difference), abs(difference) <= 20.0
    step = ratio if moving else 0.0  # d ratio / d logprob
    if name == "none":
        return -ratio * a, -step * a
    if name == "sapo":
        tau = level["tau_pos"] if a > 0 else level["tau_neg"]
        gate = 1.0 / (1.0 + math.exp(-tau * (ratio - 1.0))) if ratio < 300 else 1.0
        return -a * gate * 4.0 / tau, -a * 4.0 * gate * (1.0 - gate) * step
    low, high = 1.0 - level["clip_low"], 1.0 + level["clip_high"]
    if name == "cispo":
        weight = hold(ratio, low, high)
        return -a * weight * lp, -a * weight
    return _ppo(ratio, step, a, low, high, level.get("dual_clip"))


def _ppo(ratio: float, step: float, a: float, low: float, high: float, dual: float | None) -> tuple[float, float]:
    if a > 0 and ratio > high:
        return -high * a, 0.0
    if a < 0 and ratio < low:
        return -low * a, 0.0
    if a < 0 and dual is not None and ratio > dual:
        return -dual * a, 0.0
    return -ratio * a, -step * a


def tis(level: Level, old: Matrix, rollout: Matrix, mask: list[list[bool]]) -> Matrix:
    """What multiplies the surrogate of each loss token."""
    weight = zeros(mask)
    for i, row in enumerate(mask):
        tokens = [t for t, m in enumerate(row) if m]
        logs = {t: old[i][t] - rollout[i][t] for t in tokens}
        for t in tokens:
            weight[i][t] = _tis_weight(level, logs[t], list(logs.values()))
    return weight


def _tis_weight(level: Level, log_rho: float, row: list[float]) -> float:
    name, rho = level["name"], bounded_exp(log_rho)
    if name == "off":
        return 1.0
    if name == "token":
        return min(rho, level["cap"])
    if name == "sequence":
        return min(bounded_exp(math.fsum(row)), level["cap"])
    low, high = level["low"], level["high"]
    if name == "icepop":
        return rho if low <= rho <= high else 0.0
    if name == "geometric_mask":
        return float(low <= bounded_exp(math.fsum(row) / len(row)) <= high)
    if name == "product_mask":
        return float(low <= bounded_exp(math.fsum(row)) <= high)
    assert name == "outlier_mask"
    return float(all(low <= bounded_exp(x) <= high for x in row))


def kl(name: str, lp: float, ref: float) -> tuple[float, float]:
    """Estimator and its derivative by lp."""
    d = lp - ref
    if name == "none":
        return 0.0, 0.0
    if name == "k1":
        return d, 1.0
    if name == "k2":
        return d * d / 2.0, d
    held = hold(d, -20.0, 20.0)
    value = math.exp(-held) + held - 1.0
    moving = abs(d) <= 20.0 and value <= 10.0
    return min(value, 10.0), 1.0 - math.exp(-held) if moving else 0.0


def reduction(name: str, mask: list[list[bool]], prompts: list[int], adv: Matrix, max_response_len: int) -> Matrix:
    """One weight per token."""
    rows, counts = len(mask), [sum(row) for row in mask]
    group_tokens: dict[int, int] = defaultdict(int)
    for prompt, count in zip(prompts, counts, strict=True):
        group_tokens[prompt] += count
    n = sum(any(m and a != 0 for m, a in zip(*pair, strict=True)) for pair in zip(mask, adv, strict=True))
    weights = zeros(mask)
    for i, row in enumerate(mask):
        denominator = {
            "token_mean": max(sum(counts), 1),
            "sequence_mean": rows * max(counts[i], 1),
            "seq_mean_token_sum_norm": rows * max_response_len,
            "seq_mean_token_sum_norm_global": n * max_response_len,
            "prompt_mean": len(group_tokens) * max(group_tokens[prompts[i]], 1),
        }[name]
        weights[i] = [1.0 / denominator if m and denominator else 0.0 for m in row]
    return weights


def whole(levels: dict[str, Level], data: dict[str, Any], entropy_coef: float) -> tuple[float, Matrix, Matrix]:
    """Loss, d loss / d logprobs and d loss / d entropy of a mini-batch."""
    mask = [
        [m and math.isfinite(r) for m, r in zip(*pair, strict=True)]
        for pair in zip(data["loss_mask"], data["rollout_logprobs"], strict=True)
    ]
    lp, old, adv = data["logprobs"], data["old_logprobs"], data["advantages"]
    policy, slope = surrogate(levels["clip"], lp, old, adv, mask)
    weight = tis(levels["tis"], old, data["rollout_logprobs"], mask)
    name, rest = levels["reduction"]["name"], (data["prompts"], adv, data["max_response_len"])
    outer = reduction(name, mask, *rest)
    inner = outer
    if levels["tis"]["renormalize"]:
        kept = [[m and w > 0 for m, w in zip(*pair, strict=True)] for pair in zip(mask, weight, strict=True)]
        inner = reduction(name, kept, *rest)
    loss, grad, grad_entropy = 0.0, zeros(mask), zeros(mask)
    for i, row in enumerate(mask):
        for t, m in enumerate(row):
            if not m:
                continue
            value, pull = kl(levels["kl"]["name"], lp[i][t], data["ref_logprobs"][i][t])
            coef = levels["kl"]["kl_coef"]
            loss += inner[i][t] * policy[i][t] * weight[i][t]
            loss += outer[i][t] * (coef * value - entropy_coef * data["entropy"][i][t])
            grad[i][t] = inner[i][t] * slope[i][t] * weight[i][t] + outer[i][t] * coef * pull
            grad_entropy[i][t] = -entropy_coef * outer[i][t]
    return loss, grad, grad_entropy


def advantages(level: Level, rewards: list[float], prompts: list[int], included: list[bool]) -> list[float]:
    """Credit of each rollout; groups by prompt id."""
    groups: dict[int, list[int]] = defaultdict(list)
    for i, prompt in enumerate(prompts):
        if included[i] and math.isfinite(rewards[i]):
            groups[prompt].append(i)
    credit = [0.0] * len(rewards)
    for members in groups.values():
        values = [rewards[i] for i in members]
        if max(values) - min(values) <= 1e-5 + 4e-16 * max(map(abs, values)):
            continue
        n, mean = len(values), math.fsum(values) / len(values)
        std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
        others = {i: (math.fsum(values) - rewards[i]) / (n - 1) for i in members}
        for i in members:
            credit[i] = {
                "grpo": (rewards[i] - mean) / (std + 1e-6),
                "grpo_no_std": rewards[i] - mean,
                "rloo": rewards[i] - others[i],
                "rloo_n": rewards[i] - others[i] if n >= level.get("min_group_size", 1) else 0.0,
                "maxrl": (rewards[i] - mean) / (mean + 1e-6),
            }[level["name"]]
    return credit


def zeros(like: list[list[Any]]) -> Matrix:
    return [[0.0] * len(row) for row in like]
