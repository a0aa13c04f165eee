"""Which tokens may come next in an answer, so that whatever is written can be parsed.

Parsing is strict, and a small model writes a number too many now and then: a good diagnosis with a
bad last line is worth nothing. Generation is therefore held to the answer's form, line by line, in
moments (:mod:`regrasp.relabel.diagnose.frames`). What the lines say is the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import regex
from regrasp.relabel.diagnose.frames import FrameChoice, moment

#: Characters of a free line after its key; a model that repeats itself is stopped here.
_LONGEST = 220
_NUMBER = r"[+-]\d{1,4}"


class Grammar:
    """The form of an answer over a tokenizer's entries.

    Args:
        tokenizer: of the model.
        types: the failure types there are.
        choice: what is shown; counts by moments.

    Raises:
        ValueError: the choice counts by steps.
    """

    def __init__(self, tokenizer: Any, types: Sequence[str], choice: FrameChoice) -> None:
        if choice.count_by != "moment":
            raise ValueError("Grammar: the answer's steps are held to moments; count_by='moment'")
        self._tokenizer, self._end = tokenizer, tokenizer.eos_token_id
        special = set(tokenizer.all_special_ids)
        self._pieces = {i: tokenizer.decode([i]) for i in range(len(tokenizer)) if i not in special}
        # Half a character, or one that some programs take for the end of a line, is no text.
        self._pieces = {
            i: t
            for i, t in self._pieces.items()
            if t and "\ufffd" not in t and t.replace("\n", "").isprintable()
        }
        self._moments = [moment(i) for i in range(choice.frames)]
        free = r"\S[^\n]*\n"
        lines = (
            r"failed: (?:yes\n|no)",
            rf"type: (?:{'|'.join(map(regex.escape, types))})\n",
            "",
            rf"subtask: {free}",
            r"severity: [1-4]\n",
            rf"why: {free}",
            rf"do: {free}",
            rf"delta: {' '.join([_NUMBER] * 3)} mm {' '.join([_NUMBER] * 3)} deg "
            r"(?:open|keep|close)",
        )
        self._lines = [regex.compile(line) for line in lines]
        self._allowed = lru_cache(maxsize=50_000)(self._of_line)

    def __call__(self, asked: int) -> Callable[[int, Any], list[int]]:
        """For ``generate(prefix_allowed_tokens_fn=...)``; ``asked`` tokens are the question's."""

        def allowed(_: int, tokens: Any) -> list[int]:
            written = [t for t in tokens[asked:].tolist() if t != self._end]
            if len(written) < len(tokens) - asked:
                return [self._end]
            return self.after(self._tokenizer.decode(written))

        return allowed

    def after(self, text: str) -> list[int]:
        """Tokens that may follow an answer's beginning; the end token alone where it is whole."""
        *before, line = text.split("\n")
        number = len(before)
        if text == "failed: no" or (number == 7 and self._lines[7].fullmatch(line)):
            return [self._end]
        if number in (3, 5, 6) and ": " in line and len(line.partition(": ")[2]) > 1:
            # What a free line says does not matter, only whether it may end and must.
            key, _, said = line.partition(": ")
            line = f"{key}: {'x' * (_LONGEST if len(said) >= _LONGEST else 2)}"
            line = line[:-1] + " " if said.endswith(" ") else line
        return self._allowed(number, line)

    def _of_line(self, number: int, line: str) -> list[int]:
        if number == 2:
            return self._when(line)
        pattern = self._lines[number]
        full = number in (3, 5, 6) and len(line.partition(": ")[2]) >= _LONGEST
        return [
            token
            for token, piece in self._pieces.items()
            if pattern.fullmatch(line + piece, partial=True)
            and not (piece.startswith("\n") and line.endswith(" "))
            and not (full and not piece.startswith("\n") and not line.endswith(" "))
            and "\n" not in piece[:-1]
            and not piece.endswith(" \n")
        ]

    def _when(self, line: str) -> list[int]:
        """The line of the moments: the second is not before the first."""
        wanted = [
            f"steps: {a}-{b}\n" for i, a in enumerate(self._moments) for b in self._moments[i:]
        ]
        fitting = [whole[len(line) :] for whole in wanted if whole.startswith(line)]
        return [
            token
            for token, piece in self._pieces.items()
            if any(rest.startswith(piece) for rest in fitting)
        ]
