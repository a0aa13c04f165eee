"""The report of a real (if tiny) run, opened in a browser: its numbers, its films, its cursor."""

import json
import re

import chromium
import numpy as np
import pytest
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import EpisodeHeader
from regrasp.monitors.runtime import calibrate_monitor
from regrasp.monitors.scores.rnd_oe import RndOe
from regrasp.monitors.scores.tide import Tide
from regrasp.recovery.supervisor import Supervisor, SupervisorConfig
from regrasp.scripts._summary import pair_up, summarise
from regrasp.scripts.report import build_report, encode_video, video_path
from tabletop import BIN, StalePlanner, Tabletop

PERTURBED, CALM, FILMS = 14, 20, 3


def episode(seed, arm, kind, monitor=None, tries=0):
    env = Tabletop(seed, slip_at=0.12 if kind == "slip" else None, horizon=200)
    header = EpisodeHeader(
        "tabletop", "cube", env.instruction, seed % 50, seed, False, kind, policy_hash="stale",
        protocol_hash="toy", extra={"pair": f"{kind}/{seed}", "arm": arm, "kind": kind},
    )  # fmt: skip
    events = []

    def record():
        if kind == "slip" and env.slip_at is None and not events:
            events.append({"kind": "slip", "step": env.t, "end": env.t + 1})
        return {"hand": env.hand.copy(), "object": env.object.copy()}

    config = SupervisorConfig(tries=tries, execute=6)
    out = Supervisor(StalePlanner(), monitor, config, record=record).run(env, header)
    out.header.extra["events"] = events
    return out


def picture(hand, thing):
    """A drawing of the table seen from above, 96 x 96."""
    image = np.full((96, 96, 3), 235, np.uint8)
    for (x, y), size, colour in (
        (BIN, 8, (190, 200, 190)),
        (thing[:2], 4, (190, 40, 60)),
        (hand[:2], 3 + int(10 * max(0, hand[2])), (40, 60, 90)),
    ):
        row, col = int((x + 0.4) * 110), int((y + 0.4) * 110)
        image[max(0, row - size) : row + size, max(0, col - size) : col + size] = colour
    return image


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    training = [episode(seed, "calibration", "none") for seed in range(15)]
    rnd = RndOe.train(
        np.concatenate([e.chunks["embedding"] for e in training]), width=32, epochs=60
    )
    calibration = [episode(seed, "calibration", "none") for seed in range(20, 60)]
    monitor = calibrate_monitor([Tide(), rnd], calibration, 0.1)
    store = EpisodeStore.create(folder / "store")
    films = 0
    for kind, seeds in (("slip", range(100, 100 + PERTURBED)), ("none", range(200, 200 + CALM))):
        for seed in seeds:
            arms = {
                "base": episode(seed, "base", kind, monitor),
                "supervised": episode(seed, "supervised", kind, monitor, tries=2),
            }
            for arm, e in arms.items():
                store.append(e)
                if films < 2 * FILMS:
                    frames = np.stack(
                        [
                            picture(*hs)
                            for hs in zip(e.steps["hand"], e.steps["object"], strict=True)
                        ]
                    )
                    encode_video(video_path(folder, f"{kind}/{seed}", arm), frames[::2], 10)
                    films += 1
    facts = {
        "alpha": 0.1, "n_calibration": monitor.calibration.n, "suites": "tabletop",
        "policy_hash": "stale", "protocol_hash": "toy", "protocol": {"horizon": 200},
        "thresholds": monitor.calibration.thresholds, "control_hz": 20.0, "video_fps": 10.0,
        "video_stride": 2, "command": "pytest tests/end_to_end", "pairing": "same seeds",
        "evaluated_on": "seeds 100 to 219", "minutes": 0.1, "workers": 1,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(facts))
    build_report(folder)
    return folder


def test_one_file_without_addresses(run):
    text = (run / "report.html").read_text()
    assert len(text) < 5e6
    assert not re.findall(r"https?://", text)
    assert text.count("data:video/mp4") == 2 * FILMS


def test_half_a_pair_is_refused(run):
    headers = EpisodeStore.open(run / "store").headers
    with pytest.raises(ValueError, match="ran in one arm only"):
        pair_up(headers[:-1])


def test_in_a_browser(run, tmp_path):
    headers = EpisodeStore.open(run / "store").headers
    summary = summarise(pair_up(headers), 0.1, 40)
    with chromium.open_page(run / "report.html", tmp_path / "profile") as page:
        page.wait("document.getElementById('main').dataset.ready === 'yes'")
        text = page.evaluate("document.body.innerText")
        p = summary.paired
        assert f"On {p.n} perturbed episodes" in text
        assert f"in {p.both + p.harmed}, with the supervisor in {p.both + p.rescued}." in text
        low, high = p.interval()
        assert f"{100 * low:+.0f} to {100 * high:+.0f}" in text
        rate = summary.false_alarms.value
        assert f"{100 * rate:.0f} %" in page.evaluate(
            "document.getElementById('rates').textContent"
        )
        for key in ("both", "rescued", "harmed", "neither"):
            shown = page.evaluate(f"document.querySelector('.mosaic .{key} b').textContent")
            assert int(shown) == getattr(p, key)

        # The table filters.
        rows = "document.querySelectorAll('#rows tr').length"
        assert page.evaluate(rows) == PERTURBED + CALM
        page.evaluate(
            "(() => {const f = document.getElementById('f-outcome'); f.value = 'rescued';"
            "f.dispatchEvent(new Event('input'));})()"
        )
        everything = p.rescued + summary.unperturbed.rescued
        assert page.evaluate(rows) == everything > 0

        # Films decode, play together, and carry the cursor along.
        page.wait("[...document.querySelectorAll('video')].every(v => v.readyState >= 3)")
        assert page.evaluate("document.querySelectorAll('video').length") == 2
        assert page.evaluate("document.querySelector('video').videoWidth") == 96
        page.evaluate("document.getElementById('play').click()")
        page.wait("[...document.querySelectorAll('video')].some(v => v.currentTime > 0.5)")
        assert page.evaluate("player.step") > 4
        page.evaluate("document.getElementById('play').click()")
        assert page.evaluate("[...document.querySelectorAll('video')].every(v => v.paused)")

        # Dragging on the curve seeks the films.
        box = page.evaluate(
            "(() => {const r = document.getElementById('track-supervised')"
            ".getBoundingClientRect(); return [r.left, r.top, r.width, r.height]})()"
        )
        page.evaluate("document.getElementById('track-supervised').scrollIntoView()")
        box = page.evaluate(
            "(() => {const r = document.getElementById('track-supervised')"
            ".getBoundingClientRect(); return [r.left, r.top, r.width, r.height]})()"
        )
        x, y = box[0] + 0.5 * box[2], box[1] + 0.5 * box[3]
        for kind, at in (("mousePressed", x - 80), ("mouseMoved", x), ("mouseReleased", x)):
            page.call(
                "Input.dispatchMouseEvent", type=kind, x=at, y=y, button="left", buttons=1,
                clickCount=1,
            )  # fmt: skip
        step = page.evaluate("player.step")
        length = page.evaluate("player.length")
        assert 0.35 * length < step < 0.6 * length
        seconds = page.evaluate("document.getElementById('video-supervised').currentTime")
        assert seconds == pytest.approx(step / 20, abs=0.06)
        assert page.evaluate("Number(document.querySelector('.cursor').getAttribute('x1'))") > 400
        # The supervised track shows its rewind and alarm.
        assert page.evaluate("document.querySelectorAll('#track-supervised circle').length") >= 1
