"""Reverse a digit string: "1234=" -> "4321". Ragged lengths, an exact 0/1 reward, a 16-character vocabulary."""

from __future__ import annotations

import hashlib
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ablate.errors import UsageError
from ablate.task.base import HELDOUT_ID_OFFSET, Prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = (PAD, EOS, UNKNOWN, *"0123456789=+-")
_ID = {token: i for i, token in enumerate(VOCABULARY)}
_HELDOUT_ONE_IN = 5


@dataclass(frozen=True)
class Reverse:
    """Digit strings of `min_digits` to `max_digits` digits, each length equally often.

    One string in five is held out, by a hash of the string itself: whatever the sizes, nothing evaluated was ever
    trained on. There are 100 strings of two digits, so short prompts recur under several ids.
    """

    train_size: int
    heldout_size: int
    min_digits: int = 2
    max_digits: int = 5

    name: str = field(default="reverse", init=False)
    vocab_size: int = field(default=len(VOCABULARY), init=False)
    eos_id: int = field(default=_ID[EOS], init=False)
    pad_id: int = field(default=_ID[PAD], init=False)

    def __post_init__(self) -> None:
        if not 2 <= self.min_digits <= self.max_digits:
            raise UsageError(
                f"task=reverse needs 2 <= min_digits <= max_digits, got {self.min_digits} and {self.max_digits}: "
                "one digit reversed is itself, and ten strings cannot be split"
            )

    @property
    def length_cv(self) -> float:
        """Coefficient of variation of the right response's length, digits and end token: about 0.25 for 2 to 5."""
        lengths = range(self.min_digits + 1, self.max_digits + 2)
        return statistics.pstdev(lengths) / statistics.fmean(lengths)

    @property
    def max_prompt_len(self) -> int:
        """Tokens of the longest prompt: its digits and the equals sign."""
        return self.max_digits + 1

    def train_prompt(self, i: int) -> Prompt:
        """Train prompt `i`; raises IndexError outside [0, train_size)."""
        if not 0 <= i < self.train_size:
            raise IndexError(f"train prompt {i} of {self.train_size}")
        return self._prompt(i, self._digits("train", i))

    def heldout_prompt(self, i: int) -> Prompt:
        """Held-out prompt `i`; raises IndexError outside [0, heldout_size)."""
        if not 0 <= i < self.heldout_size:
            raise IndexError(f"held-out prompt {i} of {self.heldout_size}")
        return self._prompt(HELDOUT_ID_OFFSET + i, self._digits("heldout", i))

    def verify(self, prompt: Prompt, response_text: str) -> float:
        """1.0 for exactly the answer, else 0.0: no stripping, no partial credit."""
        return float(response_text == prompt.answer)

    def encode(self, text: str) -> tuple[int, ...]:
        """One id per character; characters outside the vocabulary become the unknown token."""
        unknown = _ID[UNKNOWN]
        return tuple(_ID.get(character, unknown) for character in text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a response without its one final end token.

        A pad or a second end token inside stays visible and so is never rewarded. Raises IndexError for an id
        outside the vocabulary.
        """
        if ids and ids[-1] == self.eos_id:
            ids = ids[:-1]
        if any(i < 0 for i in ids):
            raise IndexError("token ids are not negative")
        return "".join([VOCABULARY[i] for i in ids])

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The character vocabulary as a transformers tokenizer; survives `save_pretrained` and `AutoTokenizer`."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        backend = Tokenizer(models.WordLevel(_ID, unk_token=UNKNOWN))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        backend.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            pad_token=PAD,
            eos_token=EOS,
            unk_token=UNKNOWN,
            padding_side="left",
            clean_up_tokenization_spaces=False,
        )

    def _digits(self, split: str, i: int) -> str:
        digits = self.min_digits + i % (self.max_digits - self.min_digits + 1)
        for attempt in range(10_000):
            text = f"{_hash(f'{split},{i},{attempt}') % 10**digits:0{digits}d}"
            if is_heldout(text) == (split == "heldout"):
                return text
        raise AssertionError(f"no {split} string of {digits} digits found")

    def _prompt(self, number: int, digits: str) -> Prompt:
        text = digits + "="
        return Prompt(id=number, ids=self.encode(text), text=text, answer=digits[::-1])


def is_heldout(digits: str) -> bool:
    """Whether a digit string belongs to the held-out fifth."""
    return _hash(f"split,{digits}") % _HELDOUT_ONE_IN == 0


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
