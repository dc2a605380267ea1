"""The reverse task: split, determinism, rewards, and a tokenizer that agrees with the plain dictionary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ablate.errors import UsageError
from ablate.task.base import HELDOUT_ID_OFFSET, Task, epoch_of, make_task, steps_per_epoch, train_prompts
from ablate.task.reverse import Reverse, is_heldout

TASK = Reverse(train_size=1000, heldout_size=200)


def test_answers_are_reversed_and_lengths_uniform() -> None:
    prompts = [TASK.train_prompt(i) for i in range(1000)]
    assert all(p.text[-1] == "=" and p.answer == p.text[:-1][::-1] for p in prompts)
    assert np.bincount([len(p.answer) for p in prompts]).tolist() == [0, 0, 250, 250, 250, 250]
    assert max(len(p.ids) for p in prompts) == TASK.max_prompt_len


def test_no_heldout_string_is_ever_trained_on_whatever_the_sizes() -> None:
    large = Reverse(train_size=20_000, heldout_size=2_000)
    train = {large.train_prompt(i).text for i in range(20_000)}
    heldout = {large.heldout_prompt(i).text for i in range(2_000)}
    assert not train & heldout
    assert all(is_heldout(text[:-1]) for text in heldout)
    assert len({text for text in heldout if len(text) == 3}) > 10


def test_prompts_do_not_depend_on_the_sizes() -> None:
    larger = Reverse(train_size=5000, heldout_size=900)
    assert larger.train_prompt(7) == TASK.train_prompt(7)
    assert larger.heldout_prompt(7) == TASK.heldout_prompt(7)
    assert TASK.heldout_prompt(7).id == HELDOUT_ID_OFFSET + 7


@pytest.mark.parametrize("index", [-1, 1000])
def test_out_of_range_prompts_are_refused(index: int) -> None:
    with pytest.raises(IndexError):
        TASK.train_prompt(index)


def test_declared_length_variation_is_that_of_right_responses() -> None:
    lengths = [len(TASK.train_prompt(i).answer) + 1 for i in range(1000)]
    assert TASK.length_cv == pytest.approx(np.std(lengths) / np.mean(lengths))
    assert Reverse(10, 10, 4, 4).length_cv == 0


@pytest.mark.parametrize("wrong", ["", "12", "4321 ", " 4321", "43210", "4322", "4321<eos>", "<pad>4321"])
def test_reward_is_exact(wrong: str) -> None:
    prompt = next(p for p in map(TASK.train_prompt, range(1000)) if len(p.answer) == 4)
    assert TASK.verify(prompt, prompt.answer) == 1.0
    assert TASK.verify(prompt, wrong.replace("4321", prompt.answer) if "4321" in wrong else wrong) == 0.0


def test_decode_drops_one_final_end_token_and_shows_every_other_special_token() -> None:
    ids = TASK.encode("12")
    assert TASK.decode((*ids, TASK.eos_id)) == "12"
    assert TASK.decode(ids) == "12"
    assert TASK.decode(()) == "" == TASK.decode((TASK.eos_id,))
    assert TASK.decode((*ids, TASK.eos_id, TASK.eos_id)) == "12<eos>"
    assert TASK.decode((TASK.pad_id, *ids)) == "<pad>12"
    for bad in (-1, TASK.vocab_size):
        with pytest.raises(IndexError):
            TASK.decode((bad,))


def test_tokenizer_agrees_and_survives_saving(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    TASK.tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == TASK.vocab_size == 16
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (TASK.eos_id, TASK.pad_id)
    for prompt in map(TASK.train_prompt, range(20)):
        assert tuple(tokenizer(prompt.text, add_special_tokens=False)["input_ids"]) == prompt.ids
        response = (*TASK.encode(prompt.answer), TASK.eos_id)
        assert tokenizer.decode(response, skip_special_tokens=True) == prompt.answer == TASK.decode(response)
    assert tuple(tokenizer("1a2")["input_ids"]) == TASK.encode("1a2")


def test_an_epoch_sees_each_prompt_at_most_once_and_drops_the_remainder() -> None:
    assert steps_per_epoch(1000, 64) == 15
    ids = [[p.id for p in train_prompts(TASK, 3, step, 64)] for step in range(1, 16)]
    assert len({i for step in ids for i in step}) == 15 * 64
    assert [epoch_of(TASK, step, 64) for step in (1, 15, 16, 31)] == [0, 0, 1, 2]
    assert [p.id for p in train_prompts(TASK, 3, 16, 64)] != ids[0]


def test_prompts_are_the_stated_permutation_and_pure() -> None:
    key = np.array([3, 1], dtype=np.uint64)
    order = np.random.Generator(np.random.Philox(key=key)).permutation(1000)
    assert [p.id for p in train_prompts(TASK, 3, 17, 64)] == order[64:128].tolist()
    assert train_prompts(TASK, 3, 17, 64) == train_prompts(TASK, 3, 17, 64) != train_prompts(TASK, 4, 17, 64)


def test_steps_count_from_one_and_must_fit() -> None:
    with pytest.raises(ValueError, match="from 1"):
        train_prompts(TASK, 0, 0, 8)
    with pytest.raises(UsageError, match="1001 prompts"):
        train_prompts(TASK, 0, 1, 1001)


@pytest.mark.parametrize(("low", "high"), [(1, 3), (5, 4), (0, 0)])
def test_impossible_digits_are_refused(low: int, high: int) -> None:
    with pytest.raises(UsageError, match="min_digits"):
        Reverse(10, 10, low, high)


def test_a_planned_task_has_sizes_but_cannot_run() -> None:
    from ablate.config import Task as TaskConfig

    config = TaskConfig(name="pymethods2test", train_size=5000, heldout_size=10, reward="binary")
    task: Task = make_task(config)
    assert steps_per_epoch(task.train_size, 64) == 78
    with pytest.raises(UsageError, match="pymethods2test"):
        task.train_prompt(0)
    with pytest.raises(UsageError, match="reverse"):
        make_task(config.model_copy(update={"name": "reverze"}))
