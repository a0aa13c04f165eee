"""Any policy and its monitor as one policy."""

import json
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from regrasp.episodes.types import (
    LIBERO_ACTION,
    LIBERO_STATE,
    Episode,
    EpisodeHeader,
    Observation,
    PolicyOutput,
)
from regrasp.monitors.conformal import Calibration
from regrasp.monitors.live import MonitorRuntime
from regrasp.monitors.runtime import Monitor, describe_spec, replay
from regrasp.monitors.scores.clock import Clock
from regrasp.monitors.scores.spread import FlowSpread
from regrasp.monitors.scores.tide import Tide
from regrasp.monitors.thresholds import Constant, Grouped, Segmented

H, K = 8, 4


@dataclass(frozen=True)
class Spec:
    cameras: dict
    state: object = LIBERO_STATE
    action: object = LIBERO_ACTION
    chunk: int = H
    control_hz: float = 20.0


class Scripted:
    """Chunks of noise around a line; as many as are asked for."""

    spec = Spec({"front": (8, 8)})

    def __init__(self):
        self.asked = []

    def reset(self, seed):
        self.rng = np.random.default_rng(seed)

    def infer(self, observations, num_samples=1):
        self.asked.append(num_samples)
        samples = self.rng.normal(0, 0.1, (num_samples, H, 7)).astype(np.float32)
        return [PolicyOutput(samples, np.ones(3, np.float32))]

    def hash(self):
        return "scripted"


SEEN = [Observation({"front": np.zeros((8, 8, 3), np.uint8)}, np.zeros(8, np.float32), "go")]


def monitor_of(scores, thresholds, **changes):
    calibration = Calibration(dict.fromkeys(thresholds, 0.0), 0.1, 10, 10, "bonferroni")
    facts = {"policy_hash": "scripted", "protocol_hash": "q", "spec": describe_spec(Scripted.spec)}
    return Monitor(scores, calibration, thresholds=thresholds, **(facts | changes))


@pytest.fixture
def monitor():
    scores = [Tide(), FlowSpread()]
    return monitor_of(scores, {"tide": Constant(0.5, 0.05, 10), "spread": Constant(math.inf)})


def drive(runtime, inferences=6):
    outputs = []
    runtime.reset(3)
    for _ in range(inferences):
        (output,) = runtime.infer(SEEN)
        outputs.append(output)
        runtime.executed(output.samples[0][:K])
    return outputs


def test_it_asks_for_what_its_scores_need_and_hands_out_what_was_asked(monitor):
    policy = Scripted()
    runtime = MonitorRuntime(policy, monitor, protocol_hash="q")
    outputs = drive(runtime)
    assert policy.asked == [16] * 6
    assert [o.samples.shape for o in outputs] == [(1, H, 7)] * 6
    plain = Scripted()
    plain.reset(3)
    expected = [plain.infer(SEEN, 16)[0].samples[0] for _ in range(6)]
    np.testing.assert_array_equal([o.samples[0] for o in outputs], expected)
    assert len(runtime.overhead_ms) == 6
    assert runtime.spec is policy.spec
    assert runtime.hash() == "scripted"


def test_with_a_monitor_of_one_sample_the_run_is_the_policys_own():
    one = monitor_of([Tide(), Clock()], {"tide": Constant(0.0), "clock": Constant(0.0)})
    outputs = drive(MonitorRuntime(Scripted(), one, protocol_hash="q"))
    alone = Scripted()
    alone.reset(3)
    expected = [alone.infer(SEEN)[0] for _ in range(6)]
    for mine, theirs in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(mine.samples, theirs.samples)
        np.testing.assert_array_equal(mine.embedding, theirs.embedding)


def test_readings_are_those_of_the_stored_episode(monitor):
    lines = []
    runtime = MonitorRuntime(Scripted(), monitor, protocol_hash="q", listen=lines.append)
    drive(runtime)
    policy = Scripted()
    policy.reset(3)
    outputs = [policy.infer(SEEN, 16)[0] for _ in range(6)]
    chunks = {
        "step": np.arange(6) * K,
        "samples": np.stack([o.samples for o in outputs]),
        "embedding": np.stack([o.embedding for o in outputs]),
    }
    actions = np.concatenate([o.samples[0][:K] for o in outputs])
    episode = Episode(EpisodeHeader("s", "t", "go", 0, 3, True), {"action": actions}, chunks)
    assert [r.scores for r in replay(monitor, episode)] == [line["scores"] for line in lines]
    assert [line["step"] for line in lines] == [0, 4, 8, 12, 16, 20]
    again = json.loads(json.dumps(lines))
    assert again[0]["thresholds"] == {"tide": 0.5, "spread": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy_hash": "other"}, "policy_hash is 'other', this run has 'scripted'"),
        ({"protocol_hash": "other"}, "protocol_hash"),
    ],
)
def test_another_policy_or_protocol_is_refused(changes, message):
    other = monitor_of([Tide()], {"tide": Constant(1.0)}, **changes)
    with pytest.raises(ValueError, match=message):
        MonitorRuntime(Scripted(), other, protocol_hash="q")


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("cameras", replace(Scripted.spec, cameras={"front": (16, 16)})),
        ("control_hz", replace(Scripted.spec, control_hz=10.0)),
        ("action", replace(Scripted.spec, action=LIBERO_STATE)),
        ("state", replace(Scripted.spec, state=LIBERO_ACTION)),
    ],
)
def test_another_specification_is_refused(monitor, field, spec):
    policy = Scripted()
    policy.spec = spec
    with pytest.raises(ValueError, match=f"spec.{field} is"):
        MonitorRuntime(policy, monitor, protocol_hash="q")


def test_it_must_be_told_what_was_executed(monitor):
    runtime = MonitorRuntime(Scripted(), monitor, protocol_hash="q")
    with pytest.raises(ValueError, match="nothing was inferred"):
        _ = runtime.reading
    (output,) = runtime.infer(SEEN)
    with pytest.raises(ValueError, match=r"call executed\(actions\)"):
        runtime.infer(SEEN)
    runtime.executed(output.samples[0][:1])
    runtime.executed(output.samples[0][1:3])  # in parts
    runtime.infer(SEEN)
    assert runtime.reading.step == 3
    with pytest.raises(ValueError, match=r"give \[k, A\]"):
        runtime.executed(np.zeros(7))
    with pytest.raises(ValueError, match="2 observations"):
        runtime.infer(SEEN * 2)


def test_thresholds_follow_task_and_segment():
    limits = Grouped(
        {"s/easy": Segmented([Constant(2.0), Constant(6.0)])}, fallback=Constant(100.0)
    )
    runtime = MonitorRuntime(
        Scripted(), monitor_of([Clock()], {"clock": limits}), protocol_hash="q"
    )

    def alarms(**where):
        runtime.reset(0, **where)
        said = []
        for _ in range(4):
            (output,) = runtime.infer(SEEN)
            said.append(runtime.reading.alarm)
            runtime.executed(output.samples[0][:K])
        return said

    assert alarms(group="s/easy") == [False, True, True, True]
    assert alarms(group="s/easy", segment=1) == [False, False, True, True]
    assert alarms(group="s/easy", segment=2) == [False] * 4  # no alpha is left
    assert alarms(group="s/hard") == [False] * 4
