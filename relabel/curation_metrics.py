"""How good is each demonstration: ten metrics of data curation, one function each.

Every function takes all demonstrations and answers one score each, float64 ``[N]``, higher is
better; neighbours are always looked for in *other* demonstrations of the same group (task). Most
published metrics move with an episode's length, which in many data sets gives defects away: never
report one without :func:`regrasp.relabel.curation.residualise` or
:func:`regrasp.relabel.curation.matched_auroc` beside it (arXiv 2606.10229).

Nothing here knows which demonstrations are defective. ``success_distance`` knows which ended in
success, and ``bc_loss`` what a policy made of them; the others see motions and pictures alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

#: Seconds of a control step.
DT = 0.05

#: Every how many steps the metrics that look for neighbours take a sample.
STRIDE = 3

#: Steps ahead whose actions stand for the chunk that follows a state.
AHEAD = (0, 4, 8)

#: Rows of a distance matrix computed at once, which bounds memory.
_BLOCK = 512


@dataclass(frozen=True)
class Demonstration:
    """What the metrics see of an episode.

    Attributes:
        position: of the hand, metres, ``[T, 3]``.
        action: what a policy would imitate, ``[T, A]``; the last component is the gripper's.
        embedding: of state and pictures, every dimension of comparable spread, ``[T, D]``.
        success: whether the episode ended in success.
        group: demonstrations are compared with others of their group (the task).
        loss: a policy's mean loss on it; None where no policy was asked.
    """

    position: np.ndarray
    action: np.ndarray
    embedding: np.ndarray
    success: bool
    group: str
    loss: float | None = None

    def __len__(self) -> int:
        return len(self.position)


def deminf(demos: Sequence[Demonstration]) -> np.ndarray:
    """DemInf: an episode's share of the mutual information of states and actions.

    I(s; a) by the nearest-neighbour estimator of Kraskov, Stoegbauer and Grassberger (2004,
    algorithm 1), ``psi(k) + psi(n) - psi(n_s + 1) - psi(n_a + 1)`` at each sample, averaged over
    k = 5, 6, 7 and over the episode's samples.

    Source: Hejna et al., arXiv 2502.08623. There embeddings are a VAE's; here they are whatever
    the demonstrations hold, by default principal components.
    """
    scores = np.empty(len(demos))
    for members in _groups(demos):
        samples = _Samples.of([demos[i] for i in members])
        local = _local_information(samples, (5, 6, 7))
        scores[members] = samples.mean(local)
    return scores


def action_variance(demos: Sequence[Demonstration], k: int = 8) -> np.ndarray:
    """Self-consistency: how far actions are from those of others in similar states, negated.

    Mean squared distance of the next actions from their mean over the ``k`` states nearest in
    embedding, one of each other episode at most.

    Source: the action-divergence argument of Belkhale et al., arXiv 2306.02437.
    """
    scores = np.empty(len(demos))
    for members in _groups(demos):
        samples = _Samples.of([demos[i] for i in members])
        squared = np.empty(len(samples.episode))
        for rows in samples.blocks():
            nearest = samples.nearest_in_each(rows)
            order = np.argsort(nearest[0], axis=1)[:, :k]
            chosen = np.take_along_axis(nearest[1], order, axis=1)
            mean = samples.action[chosen].mean(axis=1)
            squared[rows] = ((samples.action[rows] - mean) ** 2).mean(axis=1)
        scores[members] = -samples.mean(squared)
    return scores


def sal(demos: Sequence[Demonstration], cutoff: float = 10.0, floor: float = 0.05) -> np.ndarray:
    """RINSE's SAL: spectral arc length of the hand's speed, negative; nearer 0 is smoother.

    Length of the curve of the normalised amplitude spectrum up to the last frequency whose
    amplitude exceeds ``floor``, at most ``cutoff`` Hz.

    Source: arXiv 2604.23000; Balasubramanian et al. (2012, 2015).
    """

    def one(demo: Demonstration) -> float:
        speed = np.linalg.norm(np.diff(demo.position, axis=0), axis=1) / DT
        size = int(2 ** (np.ceil(np.log2(max(len(speed), 2))) + 4))
        spectrum = np.abs(np.fft.rfft(speed, size))
        frequency = np.fft.rfftfreq(size, DT)
        spectrum = spectrum / max(float(spectrum.max()), 1e-12)
        heard = np.flatnonzero((spectrum >= floor) & (frequency <= cutoff))
        last = max(int(heard[-1]), 1) if len(heard) else 1
        across = np.diff(frequency[: last + 1]) / max(float(frequency[last]), 1e-12)
        return -float(np.hypot(across, np.diff(spectrum[: last + 1])).sum())

    return np.array([one(demo) for demo in demos])


def ted(demos: Sequence[Demonstration]) -> np.ndarray:
    """RINSE's TED: mean distance of the hand from smooth curves between contacts, metres, negated.

    The path is cut where the gripper's command changes (the contacts); each part is compared with
    its least-squares cubic Bezier curve.

    Source: arXiv 2604.23000.
    """

    def one(demo: Demonstration) -> float:
        parts = [_from_curve(part) for part in _between_contacts(demo)]
        return -float(np.concatenate(parts).mean())

    return np.array([one(demo) for demo in demos])


def path_efficiency(demos: Sequence[Demonstration]) -> np.ndarray:
    """Straight distance over path length, summed over the parts between contacts, in [0, 1].

    Source: one of the standard metrics of the curation testbed, arXiv 2606.10229.
    """

    def one(demo: Demonstration) -> float:
        straight = path = 0.0
        for part in _between_contacts(demo):
            straight += float(np.linalg.norm(part[-1] - part[0]))
            path += float(np.linalg.norm(np.diff(part, axis=0), axis=1).sum())
        return straight / path if path > 1e-9 else 1.0

    return np.array([one(demo) for demo in demos])


def jerk(demos: Sequence[Demonstration]) -> np.ndarray:
    """Log dimensionless jerk, negated: ``-ln(D^3 / v^2 * integral |jerk|^2 dt)``.

    D is the duration and v the peak speed. D enters cubed, so it is no metric to trust alone.

    Source: Hogan and Sternad (2009).
    """

    def one(demo: Demonstration) -> float:
        if len(demo) < 4:
            return 0.0
        speed = np.linalg.norm(np.diff(demo.position, axis=0), axis=1) / DT
        third = np.diff(demo.position, n=3, axis=0) / DT**3
        total = float((third**2).sum()) * DT
        duration = len(demo) * DT
        return -float(np.log(total * duration**3 / max(float(speed.max()), 1e-6) ** 2 + 1e-12))

    return np.array([one(demo) for demo in demos])


def length(demos: Sequence[Demonstration]) -> np.ndarray:
    """Control steps, negated: shorter is better. The confound itself, as a baseline.

    Source: the control of arXiv 2606.10229.
    """
    return -np.array([len(demo) for demo in demos], float)


def success_distance(demos: Sequence[Demonstration], k: int = 5) -> np.ndarray:
    """Mean distance of each state to its ``k`` nearest in other, successful episodes, negated.

    One state of each episode at most. A group without successes gets 0, and the only success of a
    group its lowest score: neither has anything to compare with.

    Source: nearest-neighbour outlier scores (Ramaswamy et al. 2000) in an embedding.
    """
    scores = np.empty(len(demos))
    for members in _groups(demos):
        samples = _Samples.of([demos[i] for i in members])
        succeeded = np.array([demos[i].success for i in members])
        distance = np.full(len(samples.episode), np.inf)
        for rows in samples.blocks():
            nearest, _ = samples.nearest_in_each(rows)
            others = np.sort(np.where(succeeded, nearest, np.inf), axis=1)[:, :k]
            finite = np.isfinite(others)
            total = np.where(finite, others, 0.0).sum(axis=1)
            count = finite.sum(axis=1)
            distance[rows] = np.where(count > 0, total / np.maximum(count, 1), np.inf)
        own = -samples.mean(distance)
        known = own[np.isfinite(own)]
        lowest = float(known.min()) if len(known) else 0.0
        scores[members] = np.where(np.isfinite(own), own, lowest)
    return scores


def bc_loss(demos: Sequence[Demonstration]) -> np.ndarray:
    """A behaviour-cloning policy's mean loss on the episode, negated.

    Source: loss-based filtering, a baseline of arXiv 2606.10229.

    Raises:
        ValueError: some demonstrations have no loss.
    """
    if any(demo.loss is None for demo in demos):
        raise ValueError("bc_loss: demonstrations without a loss; load them with a policy's loss")
    return -np.array([demo.loss for demo in demos], float)


def action_reversals(demos: Sequence[Demonstration], least: float = 0.1) -> np.ndarray:
    """Share of steps at which the commanded translation turns back, negated.

    A component turns back where it changes sign and is at least ``least`` before and after; a step
    counts once.

    Source: one of the standard metrics of the curation testbed, arXiv 2606.10229.
    """

    def one(demo: Demonstration) -> float:
        move = demo.action[:, : min(3, demo.action.shape[1] - 1)]
        before, after = move[:-1], move[1:]
        large = (np.abs(before) >= least) & (np.abs(after) >= least)
        turned = ((before * after < 0) & large).any(axis=1)
        return -float(turned.mean()) if len(turned) else 0.0

    return np.array([one(demo) for demo in demos])


#: Every metric by name.
METRICS: dict[str, Callable[[Sequence[Demonstration]], np.ndarray]] = {
    "deminf": deminf,
    "action_variance": action_variance,
    "sal": sal,
    "ted": ted,
    "path_efficiency": path_efficiency,
    "jerk": jerk,
    "length": length,
    "success_distance": success_distance,
    "bc_loss": bc_loss,
    "action_reversals": action_reversals,
}


def _groups(demos: Sequence[Demonstration]) -> list[np.ndarray]:
    """Indices of the demonstrations of each group."""
    names = np.array([demo.group for demo in demos])
    return [np.flatnonzero(names == name) for name in np.unique(names)]


def _between_contacts(demo: Demonstration) -> Iterator[np.ndarray]:
    """The hand's path, cut where the gripper's command changes; parts of at least two points."""
    changes = np.flatnonzero(np.diff(np.sign(demo.action[:, -1]))) + 1
    bounds = [0, *changes.tolist(), len(demo)]
    parts = [demo.position[a : b + 1] for a, b in itertools.pairwise(bounds) if b > a]
    long = [part for part in parts if len(part) > 1]
    yield from long or [demo.position]


def _from_curve(path: np.ndarray) -> np.ndarray:
    """Distance of each point from the path's least-squares cubic Bezier curve, ``[n]``.

    Points are compared with the curve at their share of the path's length.
    """
    if len(path) < 5:  # a cubic goes through up to four points
        return np.zeros(len(path))
    way = np.concatenate([[0.0], np.cumsum(np.linalg.norm(np.diff(path, axis=0), axis=1))])
    if way[-1] < 1e-9:
        return np.zeros(len(path))
    t = (way / way[-1])[:, None]
    basis = np.hstack([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3])
    points, *_ = np.linalg.lstsq(basis, path, rcond=None)
    return np.linalg.norm(path - basis @ points, axis=1)


@dataclass(frozen=True)
class _Samples:
    """Thinned states and the actions after them, of all episodes of a group.

    Attributes:
        state: ``[n, D]``; action: ``[n, len(AHEAD) * A]``, every dimension of unit spread.
        episode: number of each sample's episode, ``[n]``, ascending.
    """

    state: np.ndarray
    action: np.ndarray
    episode: np.ndarray

    @classmethod
    def of(cls, demos: Sequence[Demonstration]) -> _Samples:
        """Every :data:`STRIDE`-th step of each demonstration."""
        states, actions, episodes = [], [], []
        for number, demo in enumerate(demos):
            rows = np.arange(0, len(demo), STRIDE)
            ahead = np.minimum(rows[:, None] + AHEAD, len(demo) - 1)
            states.append(demo.embedding[rows])
            actions.append(demo.action[ahead].reshape(len(rows), -1))
            episodes.append(np.full(len(rows), number))
        action = np.concatenate(actions).astype(np.float64)
        spread = action.std(axis=0)
        action = (action - action.mean(axis=0)) / np.where(spread > 1e-6, spread, 1.0)
        return cls(np.concatenate(states).astype(np.float64), action, np.concatenate(episodes))

    def blocks(self) -> Iterator[slice]:
        """Rows in pieces whose distances to all others fit in memory."""
        for start in range(0, len(self.episode), _BLOCK):
            yield slice(start, min(start + _BLOCK, len(self.episode)))

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Mean of each episode's samples, ``[episodes]``."""
        return np.bincount(self.episode, values) / np.bincount(self.episode)

    def nearest_in_each(self, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """The nearest state in each episode: distance and sample, ``[rows, episodes]`` each.

        The own episode is infinitely far.
        """
        apart = _distances(self.state[rows], self.state)
        starts = np.flatnonzero(np.diff(self.episode, prepend=-1))
        own = self.episode[rows]
        distance = np.minimum.reduceat(apart, starts, axis=1)
        distance[np.arange(len(own)), own] = np.inf
        ends = [*starts[1:].tolist(), apart.shape[1]]
        index = [a + apart[:, a:b].argmin(axis=1) for a, b in zip(starts, ends, strict=True)]
        return distance, np.stack(index, axis=1)


def _local_information(samples: _Samples, ks: Sequence[int]) -> np.ndarray:
    """Each sample's term of the mutual information, nats, ``[n]``.

    Samples of the same episode are no neighbours (Theiler's correction): they are near in time.
    """
    n = len(samples.episode)
    psi = _digamma(n + 1)
    local = np.zeros(n)
    for rows in samples.blocks():
        other = samples.episode[rows, None] != samples.episode[None]
        state = np.where(other, _distances(samples.state[rows], samples.state), np.inf)
        action = np.where(other, _distances(samples.action[rows], samples.action), np.inf)
        joint = np.maximum(state, action)
        count = other.sum(axis=1)
        order = np.partition(joint, [k - 1 for k in ks], axis=1)
        for k in ks:
            reach = order[:, k - 1, None]
            near_state, near_action = (state < reach).sum(axis=1), (action < reach).sum(axis=1)
            terms = psi[k] + psi[count] - psi[near_state + 1] - psi[near_action + 1]
            local[rows] += terms / len(ks)
    return local


def _digamma(n: int) -> np.ndarray:
    """psi(0), which is not used, to psi(n): the harmonic numbers less Euler's constant."""
    harmonic = np.concatenate([[0.0, 0.0], np.cumsum(1.0 / np.arange(1, n))])
    return harmonic[: n + 1] - np.euler_gamma


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Euclidean distances ``[len(a), len(b)]``."""
    squared = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None] - 2 * a @ b.T
    return np.sqrt(np.maximum(squared, 0.0))
