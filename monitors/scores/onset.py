"""Onset: the probability that a failure has already begun, learned from its true beginning.

    s_t = mean over members of sigmoid(LSTM(x_1..x_t))
    L = sum_t w_t BCE(s_t, y_t),   y_t = 1 from the failure's onset on, else 0, smoothed

Published detectors know only how an episode ended and must call its good beginning a failure
(SAFE) or guess where it turned bad (Hide-and-Seek). A failure made on purpose has a known onset:
before it, a failed episode is as good an example of normality as any success. A failed episode of
unknown onset teaches only that it had failed by its last inference.
"""

from __future__ import annotations

from typing import Self

from regrasp.monitors.scores.labelled import Inputs, LabelledEpisodes
from regrasp.monitors.scores.learned import Batch, Torch, Training, import_torch
from regrasp.monitors.scores.lstm import LstmScore


def onset_loss(logits: Torch, batch: Batch, smoothing: float) -> Torch:
    """Class-balanced cross-entropy of "the failure has begun" over dated inferences.

    Both classes of inferences weigh half in a batch; targets are ``smoothing / 2`` and
    ``1 - smoothing / 2``.
    """
    torch = import_torch()
    target = batch.begun * (1.0 - smoothing) + smoothing / 2
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    after = batch.begun * batch.dated
    before = (1.0 - batch.begun) * batch.dated
    return 0.5 * sum((loss * part).sum() / part.sum().clamp(min=1.0) for part in (after, before))


class Onset(LstmScore):
    """Probability that a failure has begun; see :class:`LstmScore` for the arguments."""

    name = "onset"

    @classmethod
    def train(
        cls,
        data: LabelledEpisodes,
        *,
        seed: int = 0,
        inputs: Inputs = "embedding+action",
        components: int = 64,
        hidden: int = 128,
        members: int = 4,
        window: int = 1,
        smoothing: float = 0.05,
        training: Training | None = None,
    ) -> Self:
        """Fit to failed and successful episodes, of which failures have known onsets.

        Raises ValueError without any known onset of a failure, or with ``smoothing`` outside
        [0, 1).
        """
        onsets = data.onset or [None] * len(data)
        if not any(f and o is not None for f, o in zip(data.failed, onsets, strict=True)):
            raise ValueError("Onset.train: data.onset names no failure's onset; give some")
        if not 0 <= smoothing < 1:
            raise ValueError(f"Onset.train: smoothing is {smoothing}; it must be in [0, 1)")
        return cls._train(
            data,
            lambda logits, batch: onset_loss(logits, batch, smoothing),
            seed=seed,
            inputs=inputs,
            components=components,
            hidden=hidden,
            members=members,
            window=window,
            training=training or Training(),
        )
