"""The run that every trainer here uses: schedule, moving average, resume, a kill, bad input."""

from __future__ import annotations

import json

import pytest
import torch
from regrasp.training.run import Schedule, TrainingRun, latest
from torch import nn


class Line(nn.Module):
    """y = w x + b, and a buffer that is none of the run's business."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(width, 1)
        self.register_buffer("seen", torch.zeros(()))


def steps_of(run: TrainingRun, extra: torch.Tensor | None = None):
    def step() -> dict[str, float]:
        generator = torch.Generator().manual_seed(run.step)
        x = torch.randn(16, 3, generator=generator)
        loss = (run.network.layer(x)[:, 0] - x.sum(dim=1) - 1.0).square().mean()
        if extra is not None:
            extra.add_(1)
        return {"loss": loss.item(), "norm": run.update(loss)}

    return step


def test_learns_and_logs(tmp_path):
    run = TrainingRun(tmp_path, Line(), Schedule(steps=300, lr=0.05, warmup=10, ema=0.99))
    told = []
    run.loop(steps_of(run), lambda **row: told.append(row))
    assert run.step == 300
    assert run.progress == 1.0
    assert len(told) == 30
    assert told[-1]["loss"] < 0.01 * told[0]["loss"]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(10, 301, 10))
    # The average lags behind the weights and is what averaged() gives.
    assert torch.equal(run.averaged()["layer.weight"], run.average["layer.weight"])
    assert not torch.equal(run.average["layer.weight"], run.network.layer.weight)


def test_resumed_equals_unbroken(tmp_path):
    whole_extra, broken_extra = torch.zeros(2), torch.zeros(2)
    schedule = Schedule(steps=40, lr=0.05, warmup=5, ema=0.9)
    whole = TrainingRun(tmp_path / "a", Line(), schedule, extra={"count": whole_extra})
    whole.loop(steps_of(whole, whole_extra))

    first = TrainingRun(tmp_path / "b", Line(), schedule, extra={"count": broken_extra})
    step = steps_of(first, broken_extra)

    def stops() -> dict[str, float]:
        if first.step == 17:
            raise StopIteration
        return step()

    first.loop(stops)
    assert first.step == 17
    broken_extra.zero_()
    second = TrainingRun(tmp_path / "b", Line(), schedule, extra={"count": broken_extra})
    assert second.step == 17
    assert broken_extra[0] == 17
    second.loop(steps_of(second, broken_extra))
    for name, value in whole.network.state_dict().items():
        assert torch.equal(value, second.network.state_dict()[name]), name
    for name, value in whole.average.items():
        assert torch.equal(value, second.average[name]), name
    assert torch.equal(whole_extra, broken_extra)


def test_schedule_warms_up_and_ends_low(tmp_path):
    run = TrainingRun(tmp_path, Line(), Schedule(steps=100, lr=1.0, warmup=10, final_lr=0.1))
    rates = []
    for run.step in range(101):
        rates.append(run.learning_rate())
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0, abs=0.03)
    assert rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_half_written_checkpoint_is_ignored(tmp_path):
    run = TrainingRun(tmp_path, Line(), Schedule(steps=5, lr=0.05, warmup=1))
    run.loop(steps_of(run))
    (tmp_path / ".part-step-9").mkdir()
    (tmp_path / "step-9").mkdir()  # a folder without state.json is no checkpoint
    assert latest(tmp_path).name == "step-5"
    assert TrainingRun(tmp_path, Line(), Schedule(steps=5)).step == 5


def test_another_run_is_refused(tmp_path):
    schedule = Schedule(steps=3, warmup=1)
    run = TrainingRun(tmp_path, Line(), schedule, about={"data": "a", "batch": 4})
    run.loop(steps_of(run))
    with pytest.raises(ValueError, match=r"begun with \{'data': 'a'\}, now \{'data': 'b'\}"):
        TrainingRun(tmp_path, Line(), schedule, about={"data": "b", "batch": 4})
    with pytest.raises(ValueError, match=r"of another network.*layer\.weight"):
        TrainingRun(tmp_path, Line(4), schedule, about={"data": "a", "batch": 4})


def test_a_generator_goes_on_where_it_was(tmp_path):
    def started(seed: int) -> tuple[TrainingRun, torch.Generator]:
        noise = torch.Generator().manual_seed(seed)
        return TrainingRun(tmp_path, Line(), Schedule(steps=3), extra={"noise": noise}), noise

    run, noise = started(1)
    torch.rand(5, generator=noise)
    run.save()
    following = torch.rand(5, generator=noise)
    _, again = started(2)
    assert torch.equal(torch.rand(5, generator=again), following)


def test_moments_keep_the_layout_of_their_kernel(tmp_path):
    """The fused optimiser reads memory as it lies."""

    def started(steps: int) -> TrainingRun:
        torch.manual_seed(0)
        network = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return TrainingRun(tmp_path / "run", network, Schedule(steps=steps, warmup=1))

    def train(run: TrainingRun) -> None:
        x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(run.step))
        run.update(run.network(x).square().mean())

    whole, cut = started(6), started(6)
    for run in (whole, whole, whole, cut):
        train(run)
    cut.save()
    resumed = started(6)
    train(resumed)
    train(resumed)
    assert torch.equal(resumed.network.weight, whole.network.weight)


def test_a_timer_acts_at_the_end_and_is_logged(tmp_path):
    run = TrainingRun(tmp_path, Line(), Schedule(steps=12, warmup=1))
    run.loop(steps_of(run), timers={1e9: lambda: {"held_out": 0.5}})
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 12, 12]
    assert lines[-1]["held_out"] == 0.5


def test_values_that_only_some_steps_have_are_averaged_over_those(tmp_path):
    run = TrainingRun(tmp_path, Line(), Schedule(steps=4, warmup=1))
    step, told = steps_of(run), []

    def sometimes() -> dict[str, float]:
        row = step()
        return {**row, "rare": float(run.step)} if run.step % 2 == 0 else row

    run.loop(sometimes, lambda **row: told.append(row))
    assert told[0]["rare"] == 3.0


def test_timers_and_exports_run(tmp_path):
    run = TrainingRun(tmp_path, Line(), Schedule(steps=20, warmup=1, checkpoint_seconds=0.0))
    calls = {"timer": 0, "saved": 0}

    def count(name: str) -> None:
        calls[name] += 1

    run.loop(
        steps_of(run),
        timers={1e-9: lambda: count("timer")},
        saved=lambda: count("saved"),
    )
    assert calls == {"timer": 20, "saved": 21}
    assert len(list(tmp_path.glob("step-*"))) == 1


def test_bad_gradient_stops_the_run(tmp_path):
    run = TrainingRun(tmp_path, Line(), Schedule(steps=3))
    before = run.network.layer.weight.detach().clone()
    with pytest.raises(FloatingPointError, match="step 0"):
        run.update(run.network.layer.weight.sum() * float("nan"))
    assert torch.equal(run.network.layer.weight, before)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "minutes and steps are both 0"),
        ({"steps": 1, "warmup": 0}, "warmup: 0"),
        ({"steps": 1, "ema": 1.0}, "ema: 1.0"),
    ],
)
def test_bad_settings(settings, said):
    with pytest.raises(ValueError, match=said):
        Schedule(**settings)
