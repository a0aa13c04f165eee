"""Hide-and-Seek: find the failing moments from how episodes ended (arXiv 2605.30834).

    s_t      = sigmoid(LSTM(x_1..x_t))
    L_inter  = [m_r - max_t s_t(failure) + max_t s_t(success)]_+      over pairs
    t_on     = argmax_t (s_t - s_{t-1})
    L_intra  = [m_o - (mean_{t >= t_on} s_t - mean_{t < t_on} s_t)]_+  over failures
    L        = L_inter + lambda L_intra,   m_r = 1, m_o = 0.5

Somewhere a failure scores higher than a success does anywhere (inter), and from where its score
rises most it stays high (intra). The onset is the network's own guess, here as published; where it
is known, see :mod:`regrasp.monitors.scores.onset`.

Differences. The paper averages its inputs over non-overlapping windows of w inferences; here the
score is the sliding mean of the last ``window`` readings, so that there is a new one at every
inference. The paper does not cut failures to the length of successes; without that, max_t has more
chances in the longer failures (see :mod:`regrasp.monitors.scores.labelled`). The pairs are all of
a minibatch. The paper's lambda is not known to us; 1 is the default.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from regrasp.monitors.scores.labelled import Inputs, LabelledEpisodes
from regrasp.monitors.scores.learned import Batch, Torch, Training, import_torch
from regrasp.monitors.scores.lstm import LstmScore

#: Margins between trajectories and within one.
INTER_MARGIN, INTRA_MARGIN = 1.0, 0.5


def inter_loss(scores: Torch, batch: Batch) -> Torch:
    """Mean hinge over all pairs of a failure and a success; ``scores`` ``[B, T]`` in [0, 1]."""
    peak = (scores * batch.mask).max(dim=1).values
    failed = batch.failed > 0.5
    gap = INTER_MARGIN - peak[failed][:, None] + peak[~failed][None, :]
    return gap.clamp(min=0.0).mean()


def onset_index(scores: Torch, mask: Torch) -> Torch:
    """Where each row of ``scores`` ``[B, T]`` rises most, at least 1; int64 ``[B]``."""
    rise = scores[:, 1:] - scores[:, :-1]
    return rise.masked_fill(mask[:, 1:] < 0.5, -2.0).argmax(dim=1) + 1


def intra_loss(scores: Torch, batch: Batch) -> Torch:
    """Mean hinge over failures of at least two inferences; 0 if there is none."""
    torch = import_torch()
    rows = (batch.failed > 0.5) & (batch.mask.sum(dim=1) >= 2)
    if not bool(rows.any()):
        return scores.sum() * 0.0
    scores, mask = scores[rows], batch.mask[rows]
    late = torch.arange(scores.shape[1])[None, :] >= onset_index(scores, mask)[:, None]
    after, before = mask * late, mask * ~late
    step = (scores * after).sum(dim=1) / after.sum(dim=1)
    step = step - (scores * before).sum(dim=1) / before.sum(dim=1)
    return (INTRA_MARGIN - step).clamp(min=0.0).mean()


class HideAndSeek(LstmScore):
    """Score from contrasts between and within episodes; see :class:`LstmScore`."""

    name = "hide_and_seek"

    @classmethod
    def train(
        cls,
        data: LabelledEpisodes,
        *,
        seed: int = 0,
        inputs: Inputs = "embedding",
        components: int = 32,
        hidden: int = 64,
        members: int = 3,
        window: int = 1,
        balance: float = 1.0,
        training: Training | None = None,
    ) -> Self:
        """Fit to failed and successful episodes; ``balance`` is the paper's lambda, at least 0."""
        if balance < 0:
            raise ValueError(f"HideAndSeek.train: balance is {balance}; it must be at least 0")

        def loss(logits: Torch, batch: Batch) -> Torch:
            scores = logits.sigmoid()
            return inter_loss(scores, batch) + balance * intra_loss(scores, batch)

        return cls._train(
            data,
            loss,
            seed=seed,
            inputs=inputs,
            components=components,
            hidden=hidden,
            members=members,
            window=window,
            # An episode entered after its failure began has no rise to find.
            training=replace(training or Training(), late=0.0),
        )
