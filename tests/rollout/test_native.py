"""The native sampler against a plain full forward pass, and its independence of everything but the request."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from ablate.rollout.native import NativeSampler, draw, truncate
from ablate.rollout.types import Request, Rollout, Sampling
from ablate.task.base import Task, train_prompts

PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_response_len=6)


@pytest.fixture(scope="module")
def sampler(base: Path, task: Task) -> NativeSampler:
    return NativeSampler(base, task, "fp32")


def tokens(rollouts: list[Rollout]) -> list[tuple[int, ...]]:
    return [r.response_ids for r in rollouts]


@torch.no_grad()
def full_forward(lm: torch.nn.Module, rollout: Rollout, temperature: float) -> list[float]:
    ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
    logprobs = torch.log_softmax(lm(ids).logits[0].double() / temperature, dim=-1)
    start = len(rollout.prompt_ids) - 1
    return [float(logprobs[start + t, token]) for t, token in enumerate(rollout.response_ids)]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7, 0.0])
def test_logprobs_equal_a_full_forward_pass(
    sampler: NativeSampler, base: Path, requests_16: list[Request], temperature: float
) -> None:
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for rollout in sampler.generate(requests_16, replace(PLAIN, temperature=temperature)):
        assert rollout.logprobs == pytest.approx(full_forward(lm, rollout, temperature or 1.0), abs=1e-5)


def test_draws_do_not_depend_on_order_size_padding_or_chunks(
    sampler: NativeSampler, base: Path, task: Task, requests_16: list[Request]
) -> None:
    together = sampler.generate(requests_16, PLAIN)
    shuffled = random.Random(0).sample(range(16), 16)
    assert tokens(sampler.generate([requests_16[i] for i in shuffled], PLAIN)) == [
        together[i].response_ids for i in shuffled
    ]
    alone = [sampler.generate([request], PLAIN)[0] for request in requests_16]
    assert tokens(alone) == tokens(together)
    assert [x for r in alone for x in r.logprobs] == pytest.approx([x for r in together for x in r.logprobs], abs=1e-5)
    chunked = NativeSampler(base, task, "fp32", max_batch=3)
    assert tokens(chunked.generate(requests_16, PLAIN)) == tokens(together)


def test_equal_keys_repeat_and_other_keys_differ(sampler: NativeSampler, requests_16: list[Request]) -> None:
    first = sampler.generate(requests_16, PLAIN)
    assert sampler.generate(requests_16, PLAIN) == first
    other = sampler.generate([replace(r, key=(1, *r.key[1:])) for r in requests_16], PLAIN)
    assert tokens(other) != tokens(first)
    assert len(set(tokens(first))) > 8


def test_rollouts_say_what_they_answer(sampler: NativeSampler, requests_16: list[Request]) -> None:
    for request, rollout in zip(requests_16, sampler.generate(requests_16, PLAIN), strict=True):
        assert (rollout.prompt_id, rollout.sample) == (request.prompt.id, request.sample)
        assert rollout.prompt_ids == request.prompt.ids
        assert len(rollout.logprobs) == len(rollout.response_ids)
        assert rollout.policy_version == 0
        assert rollout.reward is None


def test_the_end_token_is_kept_and_nothing_follows_it(sampler: NativeSampler, task: Task) -> None:
    requests = [Request(p, 0, (0, p.id)) for p in train_prompts(task, 0, 1, 100)]
    rollouts = sampler.generate(requests, replace(PLAIN, max_response_len=4))
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        assert task.eos_id not in rollout.response_ids[:-1]
        ended = rollout.response_ids[-1] == task.eos_id
        assert rollout.finish_reason == ("stop" if ended else "length")
        assert len(rollout.response_ids) == 4 or ended
        assert rollout.text == task.decode(rollout.response_ids)


def test_a_longer_limit_only_prolongs(sampler: NativeSampler, requests_16: list[Request]) -> None:
    short = sampler.generate(requests_16, replace(PLAIN, max_response_len=2))
    for a, b in zip(short, sampler.generate(requests_16, PLAIN), strict=True):
        assert b.response_ids[: len(a.response_ids)] == a.response_ids


def test_greedy_takes_the_most_probable_token(sampler: NativeSampler, base: Path, requests_16: list[Request]) -> None:
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for rollout in sampler.generate(requests_16, replace(PLAIN, temperature=0.0)):
        with torch.no_grad():
            logits = lm(torch.tensor([rollout.prompt_ids + rollout.response_ids])).logits[0]
        assert logits.argmax(-1)[len(rollout.prompt_ids) - 1 : -1].tolist() == list(rollout.response_ids)


def test_first_tokens_follow_the_policys_distribution(sampler: NativeSampler, base: Path, task: Task) -> None:
    prompt = task.train_prompt(3)
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        expected = lm(torch.tensor([prompt.ids])).logits[0, -1].double().softmax(-1) * 4000
    drawn = sampler.generate([Request(prompt, k, (9, k)) for k in range(4000)], replace(PLAIN, max_response_len=1))
    counts = torch.bincount(torch.tensor([r.response_ids[0] for r in drawn]), minlength=len(expected)).double()
    order = expected.argsort(descending=True)
    common = int((expected[order] > 5).sum()) - 1  # the rest is one cell, so that every cell expects at least 5
    observed, wanted = ([*x[order][:common].tolist(), float(x[order][common:].sum())] for x in (counts, expected))
    assert stats.chisquare(observed, wanted).pvalue > 1e-3


def test_padded_vocabulary_rows_are_never_drawn(base: Path, task: Task, tmp_path: Path) -> None:
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lm.resize_token_embeddings(24, mean_resizing=False)
    with torch.no_grad():
        lm.lm_head.weight[16:] = lm.lm_head.weight[:8] * 3  # likelier than any real token
    lm.save_pretrained(tmp_path)
    request = Request(task.train_prompt(0), 0, (0,))
    padded = NativeSampler(tmp_path, task, "fp32").generate([request], PLAIN)[0]
    plain = NativeSampler(base, task, "fp32").generate([request], PLAIN)[0]
    assert padded.response_ids == plain.response_ids
    assert padded.logprobs == pytest.approx(plain.logprobs, abs=1e-6)


def test_loading_changes_the_draws_and_the_version(base: Path, task: Task, requests_16: list[Request]) -> None:
    sampler = NativeSampler(base, task, "fp32")
    before = sampler.generate(requests_16, PLAIN)
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        for p in lm.parameters():
            p.mul_(1.1)
    sampler.load(lm.named_parameters(), version=7)
    after = sampler.generate(requests_16, PLAIN)
    assert {r.policy_version for r in after} == {7}
    assert after[0].logprobs == pytest.approx(full_forward(lm, after[0], 1.0), abs=1e-5)
    assert [r.logprobs for r in after] != [r.logprobs for r in before]


def test_bf16_rounds_every_weight(base: Path, task: Task, requests_16: list[Request]) -> None:
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    exact = {name: w.clone() for name, w in lm.state_dict().items()}
    lm.load_state_dict({name: w.bfloat16().float() for name, w in exact.items()})
    rollout = NativeSampler(base, task, "bf16").generate(requests_16, PLAIN)[0]
    assert rollout.logprobs == pytest.approx(full_forward(lm, rollout, 1.0), abs=1e-5)
    lm.load_state_dict(exact)
    gap = [abs(a - b) for a, b in zip(rollout.logprobs, full_forward(lm, rollout, 1.0), strict=True)]
    assert 1e-5 < max(gap) < 0.1


def test_incomplete_weights_are_refused_and_never_sampled_from(
    base: Path, task: Task, requests_16: list[Request]
) -> None:
    sampler = NativeSampler(base, task, "fp32")
    weights = list(AutoModelForCausalLM.from_pretrained(base).named_parameters())
    with pytest.raises(ValueError, match=weights[-1][0]):
        sampler.load(weights[:-1], version=1)
    with pytest.raises(RuntimeError, match="load weights"):
        sampler.generate(requests_16, PLAIN)
    with pytest.raises(ValueError, match="nonsense"):
        sampler.load([*weights, ("nonsense", torch.zeros(1))], version=1)
    sampler.load(weights, version=2)
    assert sampler.generate(requests_16[:1], PLAIN)[0].policy_version == 2


def test_no_requests_give_no_rollouts(sampler: NativeSampler) -> None:
    assert sampler.generate([], PLAIN) == []


LOGITS = torch.log(torch.tensor([[0.05, 0.4, 0.3, 0.2, 0.05]]))


def kept(sampling: Sampling) -> list[int]:
    return torch.isfinite(truncate(LOGITS, sampling)[0]).nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 4}, [0, 1, 2, 3, 4]),  # the fourth is tied
        ({"top_p": 0.69}, [1, 2]),
        ({"top_p": 0.71}, [1, 2, 3]),
        ({"top_p": 0.01}, [1]),
        ({"min_p": 0.49}, [1, 2, 3]),
        ({"min_p": 0.51}, [1, 2]),
        ({"top_k": 2, "top_p": 0.5}, [1]),  # of the two that remain, 0.4 is 0.57
        ({"min_p": 0.49, "top_p": 0.75}, [1, 2]),  # 0.7 of 0.9 is 0.78
    ],
)
def test_truncation_keeps(changes: dict[str, float], expected: list[int]) -> None:
    assert kept(replace(PLAIN, **changes)) == expected


def test_truncated_logprobs_are_renormalised() -> None:
    token, logprob = draw(LOGITS, torch.tensor([0.99], dtype=torch.float64), replace(PLAIN, top_k=2))
    assert token.item() == 2
    assert logprob.item() == pytest.approx(math.log(0.3 / 0.7), abs=1e-6)


@pytest.mark.parametrize(
    ("u", "token"), [(0.0, 0), (0.049, 0), (0.051, 1), (0.449, 1), (0.451, 2), (0.949, 3), (1 - 2**-53, 4)]
)
def test_draws_invert_the_cumulative_distribution(u: float, token: int) -> None:
    assert draw(LOGITS, torch.tensor([u], dtype=torch.float64), PLAIN)[0].item() == token


def test_extreme_uniforms_never_select_an_excluded_token() -> None:
    logits = torch.tensor([[-1.0, 0.0, 0.3, -2.0]]).expand(2, 4)
    token, logprob = draw(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), replace(PLAIN, top_k=2))
    assert token.tolist() == [1, 2]
    assert torch.isfinite(logprob).all()


@pytest.mark.parametrize(
    "changes", [{"temperature": -1}, {"top_p": 0}, {"top_k": -1}, {"min_p": 1}, {"max_response_len": 0}]
)
def test_impossible_sampling_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        replace(PLAIN, **changes)
