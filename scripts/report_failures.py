"""`regrasp failures report`: failure samples in one HTML file that needs nothing else.

Each sample shows its film (the failure, then the recovery), the frame of the failed state with the
correction's marks on it, what happened, what to do, and what the gates found.
"""

from __future__ import annotations

import base64
import html
import io
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from string import Template

import numpy as np
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode
from regrasp.scripts.report import encode_video
from regrasp.sim.failures.symbols import Mark, draw_marks

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Failure samples</title><style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1120px; color: #1b1f24 }
article { display: grid; grid-template-columns: 512px 1fr; gap: 0 1.4rem; margin: 0 0 2rem;
  padding: 1rem; border: 1px solid #d8dee4; border-radius: 8px }
article > div { min-width: 0 } code { overflow-wrap: anywhere }
article > div:first-child { display: grid; gap: .5rem; align-content: start }
video, img { width: 100%; background: #000; border-radius: 4px }
h2 { font-size: 1.05rem; margin: 0 0 .4rem } dl { margin: 0 }
dt { color: #59636e; font-size: .82rem }
dd { margin: 0 0 .45rem } code { font-size: .85em }
</style></head><body><h1>Failure samples</h1>
<p>$count of $total samples of <code>$store</code>. A film shows the failure and then, where a way
out was found, the recovery; the marks on the frame below it are the correction.</p>
$articles
</body></html>
""")

_ARTICLE = Template("""<article id="sample-$number"><div>
<video controls muted loop preload="auto" src="data:video/mp4;base64,$film"></video>
<img alt="the failed state, with the correction's marks" src="data:image/png;base64,$frame">
</div><div><h2>$type, severity $severity (level $level of 4)</h2><dl>
<dt>task</dt><dd>$instruction <code>$sample</code>, driven by $driver</dd>
<dt>what happened</dt><dd class="explanation">$explanation</dd>
<dt>what to do</dt><dd class="correction">$correction</dd>
<dt>when</dt><dd>injected at step $injected, shows at $shows, failed at $failed; $length steps</dd>
<dt>way out</dt><dd>$recovery</dd>
</dl></div></article>
""")


@dataclass(frozen=True)
class Args:
    """Show a random choice of samples.

    Attributes:
        store: made by ``regrasp failures generate``.
        out: the HTML file.
        count: samples drawn.
        seed: of the choice.
    """

    store: Path = Path("data/failures")
    out: Path = Path("runs/failures.html")
    count: int = 20
    seed: int = 0


def main(args: Args) -> Path:
    """Write the page and return its path."""
    store = EpisodeStore.open(args.store)
    roles = [h.extra.get("role") for h in store.headers]
    failed = [i for i, role in enumerate(roles) if role == "failure"]
    mended = {
        store.headers[i].extra["sample"]: i for i, role in enumerate(roles) if role == "recovery"
    }
    rng = np.random.default_rng(args.seed)
    chosen = sorted(rng.choice(failed, min(args.count, len(failed)), replace=False))
    articles = []
    for number, index in enumerate(chosen):
        episode = store.load(int(index))
        recovery = mended.get(episode.header.extra["sample"])
        articles.append(
            _article(number, episode, None if recovery is None else store.load(recovery))
        )
    page = _PAGE.substitute(
        count=len(chosen),
        total=len(failed),
        store=html.escape(str(args.store)),
        articles="\n".join(articles),
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    temporary = args.out.with_suffix(".part")
    temporary.write_text(page)
    os.replace(temporary, args.out)
    print(f"{args.out} ({args.out.stat().st_size / 1e6:.1f} MB)")
    return args.out


def _article(number: int, episode: Episode, recovery: Episode | None) -> str:
    """One sample."""
    extra = episode.header.extra
    found = extra["recovery"]
    way = found["outcome"].replace("_", " ")
    if found["replays"]:
        tries = (f"{sum(found[key])} of {len(found[key])}" for key in ("replays", "retries"))
        way = "found; {} replays of it succeed, and {} retries of the original plan".format(*tries)
    texts = {
        "type": extra["type"],
        "severity": f"{extra['severity']:g}",
        "level": extra["level"],
        "instruction": episode.header.instruction,
        "sample": extra["sample"],
        "driver": extra["driver"],
        "explanation": extra["explanation"],
        "correction": extra["correction_text"],
        "injected": extra["injection_step"],
        "shows": extra["first_effect_step"],
        "failed": extra["predicate_fail_step"],
        "length": len(episode),
        "recovery": way,
    }
    return _ARTICLE.substitute(
        {name: html.escape(str(text)) for name, text in texts.items()},
        number=number,
        film=_film(episode, recovery),
        frame=_frame(episode),
    )


def _film(episode: Episode, recovery: Episode | None) -> str:
    """Both cameras side by side at 20 Hz, the recovery spliced in where it begins; base64."""
    parts = [_side_by_side(episode)]
    if recovery is not None:
        parts = [parts[0][: recovery.header.extra["start"]], _side_by_side(recovery)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "film.mp4"
        encode_video(path, np.concatenate(parts), 20.0)
        return base64.b64encode(path.read_bytes()).decode()


def _side_by_side(episode: Episode) -> np.ndarray:
    return np.concatenate([episode.steps["image/agentview"], episode.steps["image/wrist"]], axis=2)


def _frame(episode: Episode) -> str:
    """The failed state seen by both cameras, with the correction's marks; a PNG in base64."""
    from PIL import Image

    extra = episode.header.extra
    correction = extra["correction"]
    step = correction["step"] if correction else extra["recovery"]["from_step"]
    pictures = []
    for camera in ("agentview", "wrist"):
        marks = correction["marks"][camera] if correction else []
        picture = episode.steps[f"image/{camera}"][min(step, len(episode) - 1)]
        pictures.append(draw_marks(picture, [Mark.from_json(mark) for mark in marks]))
    buffer = io.BytesIO()
    Image.fromarray(np.concatenate(pictures, axis=1)).save(buffer, "png")
    return base64.b64encode(buffer.getvalue()).decode()
