"""The closed loop on a table that can be computed in a millisecond."""

import json

import numpy as np
import pytest
from regrasp.episodes.types import Episode, EpisodeHeader
from regrasp.monitors.base import score_episode
from regrasp.monitors.runtime import calibrate_monitor
from regrasp.monitors.scores.rnd_oe import RndOe
from regrasp.monitors.scores.tide import Tide
from regrasp.recovery.paired import Paired
from regrasp.recovery.rewind import CLOSED
from regrasp.recovery.supervisor import REWIND, Supervisor, SupervisorConfig, segment_seed
from tabletop import HOME, StalePlanner, Tabletop

WATCH = SupervisorConfig(tries=0, execute=6)


def header(seed):
    return EpisodeHeader(
        "tabletop", "cube", Tabletop.instruction, seed, seed, False, policy_hash="stale"
    )


def run(seed, monitor=None, slip_at=None, config=WATCH, **kwargs):
    env = Tabletop(seed, slip_at=slip_at)
    episode = Supervisor(StalePlanner(), monitor, config, **kwargs).run(env, header(seed))
    return episode, env


@pytest.fixture(scope="module")
def monitor():
    training = [run(seed)[0] for seed in range(20)]
    assert np.mean([e.header.success for e in training]) > 0.9
    rnd = RndOe.train(
        np.concatenate([e.chunks["embedding"] for e in training]), width=32, epochs=60
    )
    return calibrate_monitor([Tide(), rnd], [run(seed)[0] for seed in range(20, 80)], 0.1)


def test_watching_changes_nothing(monitor):
    alone, _ = run(100)
    watched, _ = run(100, monitor)
    np.testing.assert_array_equal(alone.steps["action"], watched.steps["action"])
    assert alone.header.success
    assert set(watched.chunks) - set(alone.chunks) == {"alarm", "score/tide", "score/rnd_oe"}


def test_recorded_scores_equal_rescoring(monitor):
    episode, _ = run(101, monitor, slip_at=0.12, config=SupervisorConfig(tries=2, execute=6))
    assert episode.chunks["segment"].max() >= 1
    for score in monitor.scores:
        np.testing.assert_array_equal(
            score_episode(score, episode), episode.chunks[f"score/{score.name}"]
        )


def test_slip_is_rescued_and_paired_until_the_alarm(monitor):
    config = SupervisorConfig(tries=2, execute=6)
    outcomes = []
    for seed in range(200, 225):
        base, _ = run(seed, monitor, slip_at=0.12)
        treated, _ = run(seed, monitor, slip_at=0.12, config=config)
        outcomes.append((base.header.success, treated.header.success))
        rewinds = [i for i in treated.header.interventions if i["kind"] == "rewind"]
        until = rewinds[0]["step"] if rewinds else len(base)
        np.testing.assert_array_equal(base.steps["action"][:until], treated.steps["action"][:until])
        if not rewinds:
            assert len(base) == len(treated)
    paired = Paired.count(*zip(*outcomes, strict=True))
    assert paired.rescued >= 15, paired
    assert paired.harmed == 0, paired
    assert paired.interval()[0] > 0


def test_false_alarms_stay_within_their_band(monitor):
    alarms = []
    for seed in range(300, 400):
        episode, _ = run(seed, monitor)
        if episode.header.success:
            alarms.append(episode.chunks["alarm"].any())
    # Beta-binomial for 60 calibration and about 100 test episodes, upper 99.9 %.
    assert np.mean(alarms) <= 0.3


def test_rewind_goes_through_actions_and_restarts_clean(monitor):
    env = Tabletop(202, slip_at=0.12)
    policy = StalePlanner()
    supervisor = Supervisor(policy, monitor, SupervisorConfig(tries=1, execute=6))
    episode = supervisor.run(env, header(202))
    rewind = next(i for i in episode.header.interventions if i["kind"] == "rewind")
    mode = episode.steps["mode"]
    assert (mode == REWIND).sum() == rewind["steps"] > 0
    assert env.t == len(episode)  # every control step is recorded, the rewind's too
    end = rewind["step"] + rewind["steps"]
    np.testing.assert_allclose(episode.steps["state"][end][:3], HOME[:3], atol=0.02)
    assert episode.steps["state"][end][6] == pytest.approx(0.04)  # open
    assert policy.resets == 2
    assert policy.seed == segment_seed(202, 1) != 202
    assert rewind["checkpoint"] == "start"
    json.dumps(episode.header.to_json())


def test_tries_are_bounded_and_patience_grows(monitor):
    """An object that always slips: the supervisor gives up after its tries."""

    class Greasy(Tabletop):
        def _step(self, action):
            super()._step(action)
            if self.slip_at is None:
                self.slip_at = 0.12

    def run(patience: float) -> Episode:
        config = SupervisorConfig(tries=3, execute=6, patience=patience, holding=1.0)
        env = Greasy(203, slip_at=0.12, horizon=600)
        return Supervisor(StalePlanner(), monitor, config).run(env, header(203))

    def rewinds(episode: Episode) -> list[dict]:
        return [i for i in episode.header.interventions if i["kind"] == "rewind"]

    episode = run(patience=0.3)
    assert len(rewinds(episode)) == 3
    assert not episode.header.success
    assert len(episode) == 600
    thresholds = monitor.calibration.thresholds
    for used, rewind in enumerate(rewinds(episode)):
        own = episode.chunks["segment"] == rewind["segment"]
        excess = np.max([episode.chunks[f"score/{k}"][own] / t for k, t in thresholds.items()], 0)
        evidence = 0.0
        for i, value in enumerate(excess):
            evidence = evidence + value if value > 1 else 0.0
            acted = evidence >= 0.3 * (1 + used)
            assert acted == (i == len(excess) - 1)
    # The same alarms again do not use up a patience that has doubled meanwhile.
    assert len(rewinds(run(patience=1.0))) == 1


def test_latest_verified_checkpoint_first_then_start(monitor):
    env = Tabletop(204, slip_at=0.12, horizon=600)

    def verify():
        above = 0.1 < env.hand[2] < 0.25 and env.width > 0.07
        return "hand empty above the table" if above else None

    config = SupervisorConfig(tries=2, execute=6)
    episode = Supervisor(StalePlanner(), monitor, config, verify=verify).run(env, header(204))
    rewind = next(i for i in episode.header.interventions if i["kind"] == "rewind")
    assert rewind["checkpoint"] == "hand empty above the table"
    assert 0 < rewind["checkpoint_step"] < rewind["step"]
    reached = episode.steps["state"][rewind["step"] + rewind["steps"]]
    stored = episode.steps["state"][rewind["checkpoint_step"]]
    np.testing.assert_allclose(reached[:3], stored[:3], atol=0.02)


def test_home_can_be_given():
    """After a wrong initial pose the start to go back to is the nominal one."""

    class Always(Tide):
        def update(self, output, executed):
            super().update(output, executed)
            return 1e9

    calm = calibrate_monitor([Tide()], [run(s)[0] for s in range(20)], 0.1)
    calm.scores = (Always(),)
    env = Tabletop(205)
    env.hand[:3] += [0.1, -0.1, -0.1]
    supervisor = Supervisor(StalePlanner(), calm, SupervisorConfig(tries=1, execute=6))
    episode = supervisor.run(env, header(205), home=HOME)
    rewind = next(i for i in episode.header.interventions if i["kind"] == "rewind")
    assert rewind["step"] == 0
    np.testing.assert_allclose(episode.steps["state"][rewind["steps"]][:3], HOME[:3], atol=0.02)


def test_bad_use_is_named(monitor):
    with pytest.raises(ValueError, match="needs a monitor"):
        Supervisor(StalePlanner(), None, SupervisorConfig(tries=1))
    changing = iter([{"a": np.zeros(1)}, {"b": np.zeros(1)}])
    supervisor = Supervisor(StalePlanner(), None, WATCH, record=lambda: next(changing))
    with pytest.raises(ValueError, match="give the same keys"):
        supervisor.run(Tabletop(0), header(0))


def test_recorded_rows_include_what_record_gives():
    env = Tabletop(1)
    supervisor = Supervisor(
        StalePlanner(), None, WATCH, record=lambda: {"object": env.object.copy()}
    )
    episode = supervisor.run(env, header(1))
    assert episode.steps["object"].shape == (len(episode), 3)
    assert (episode.steps["action"][:, 6] == CLOSED).any()
