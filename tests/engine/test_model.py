"""The policy against a plain transformers forward, sequence by sequence, with values and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ablate.engine import model
from ablate.engine.model import Policy, collate, load_policy

from .engine_support import TEMPERATURE, VOCABULARY, WIDTH, Sequences, loss_weights, sequences


def reference(lm: torch.nn.Module, rows: list[Sequences], temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies [B,T], one unpadded sequence at a time; 0 off the responses."""
    logprobs, entropy = torch.zeros(len(rows), WIDTH), torch.zeros(len(rows), WIDTH)
    for i, row in enumerate(rows):
        logits = lm(torch.tensor([row.prompt_ids + row.response_ids])).logits[0, :, :VOCABULARY]
        scores = torch.log_softmax(logits / temperature, dim=-1)
        for t, token in enumerate(row.response_ids):
            at = scores[len(row.prompt_ids) - 1 + t]
            logprobs[i, t], entropy[i, t] = at[token], -(at.exp() * at).sum()
    return logprobs, entropy


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [3, 1 << 20])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_values_and_gradients_equal_a_plain_forward(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tied: bool, chunk: int, attention: str
) -> None:
    folder = request.getfixturevalue("tied_base" if tied else "base")
    monkeypatch.setattr(model, "_CHUNK_TOKENS", chunk)
    monkeypatch.setattr(model, "_CHUNK_LOGITS", 1)
    rows = sequences()
    mask = loss_weights(rows, 0) != 0
    w, v = loss_weights(rows, 2), loss_weights(rows, 3)
    policy = load_policy(folder, VOCABULARY, attention)
    logprobs, entropy = policy(*collate(rows, 0, WIDTH), TEMPERATURE)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected_logprobs, expected_entropy = reference(lm, rows, TEMPERATURE)
    torch.testing.assert_close(logprobs[mask], expected_logprobs[mask], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy[mask], expected_entropy[mask], atol=1e-5, rtol=0)
    (w * logprobs + v * entropy).sum().backward()
    (w * expected_logprobs + v * expected_entropy).sum().backward()
    for (name, p), (other, q) in zip(policy.lm.named_parameters(), lm.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(p.grad, q.grad, atol=2e-5, rtol=1e-4)


def test_padded_vocabulary_rows_have_no_probability_and_no_gradient(policy: Policy) -> None:
    rows = sequences()
    with torch.no_grad():
        policy.lm.lm_head.weight[VOCABULARY:] = 100.0
    logprobs, _ = policy(*collate(rows, 0, WIDTH), TEMPERATURE)
    assert logprobs[loss_weights(rows, 0) != 0].exp().max() > 1e-3
    logprobs.sum().backward()
    assert not policy.lm.lm_head.weight.grad[VOCABULARY:].any()


def test_temperature_zero_scores_as_one(policy: Policy) -> None:
    batch = collate(sequences(), 0, WIDTH)
    assert torch.equal(policy(*batch, 0.0)[0], policy(*batch, 1.0)[0])


def test_equal_sequences_share_a_row_and_every_sequence_keeps_its_place() -> None:
    rows = sequences()
    batch = collate([*rows, *rows[::-1]], 0, WIDTH)
    assert batch.input_ids.shape[0] == len(set(rows)) == 7
    assert batch.row.tolist() == [*range(7), 6, 6, *range(6, -1, -1)]
    for row, sequence in zip(batch.row, [*rows, *rows[::-1]], strict=True):
        n = len(sequence.response_ids)
        assert tuple(batch.targets[row, :n].tolist()) == sequence.response_ids
        before = batch.input_ids[row][batch.gather_index[row, :n]]
        assert tuple(before.tolist()) == (sequence.prompt_ids[-1:] + sequence.response_ids)[:n]


def test_the_documented_batch() -> None:
    batch = collate([Sequences((4, 5, 13), (5, 4, 1))] * 2, 0, 4)
    assert [x.tolist() for x in batch] == [[[4, 5, 13, 5, 4]], [[2, 3, 4, 0]], [[5, 4, 1, 0]], [0, 0]]


def test_nothing_to_score_is_one_harmless_sequence(policy: Policy) -> None:
    logprobs, entropy = policy(*collate([], 0, WIDTH), TEMPERATURE)
    assert logprobs.shape == entropy.shape == (1, WIDTH)
    (0.0 * (logprobs + entropy)).sum().backward()
    assert all(not p.grad.any() for p in policy.parameters())


@pytest.mark.parametrize("row", [Sequences((), (1,)), Sequences((1,), (2,) * (WIDTH + 1))])
def test_impossible_sequences_are_refused(row: Sequences) -> None:
    with pytest.raises(ValueError, match="prompt"):
        collate([row], 0, WIDTH)


def test_a_vocabulary_larger_than_the_model_is_refused(base: Path) -> None:
    with pytest.raises(ValueError, match="17 tokens"):
        load_policy(base, 17, "eager")
