"""`regrasp train diagnose`, then `regrasp eval diagnose`: small, resumed, and scored."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import regrasp
from regrasp.episodes.jsonlines import JsonLines
from regrasp.relabel.diagnose.encoder import EncoderConfig
from regrasp.relabel.diagnose.frames import FrameChoice
from regrasp.relabel.diagnose.language import LanguageConfig
from regrasp.relabel.diagnose.tiny import TinySize
from regrasp.relabel.diagnose.training import TuneConfig
from regrasp.scripts import eval_diagnose, train_diagnose
from regrasp.training.run import Schedule

sys.path.insert(0, str(Path(regrasp.__file__).parent / "tests/relabel"))
from failure_store import write_store

TINY = TinySize(
    patch=8, shuffle=2, vision_width=32, vision_layers=1, text_width=32, text_layers=1,
    vocabulary=400,
)  # fmt: skip
QUICK = Schedule(steps=4, warmup=1, threads=1, ema=0.9)
TRAIN = train_diagnose.Args(
    choice=FrameChoice(frames=3, size=32, count_by="moment"),
    size=TINY,
    encoder=EncoderConfig(schedule=QUICK, batch=4, bf16=False),
    language=LanguageConfig(schedule=QUICK, batch=4, bf16=False),
    training=TuneConfig(minutes=0, steps=4, batch=4, warmup=1, threads=1, bf16=False),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("diagnose")
    stores = (write_store(root / "store"),)
    train_diagnose.main(replace(TRAIN, stores=stores, out=root / "seen"))
    train_diagnose.main(replace(TRAIN, stores=stores, out=root / "unseen", text_only=True))
    return root


def arguments(root):
    return eval_diagnose.Args(
        stores=(root / "store",),
        model=root / "seen/fp16",
        text_only=root / "unseen/fp16",
        out=root / "eval",
    )


def test_the_model_is_small_and_a_finished_run_is_not_run_again(world):
    folder = world / "seen/fp16"
    assert sum(f.stat().st_size for f in folder.iterdir()) < train_diagnose.LARGEST
    rows = JsonLines(world / "seen/log.jsonl").read()
    train_diagnose.main(replace(TRAIN, stores=(world / "store",), out=world / "seen"))
    assert JsonLines(world / "seen/log.jsonl").read() == rows


def test_a_run_on_other_pictures_is_refused(world):
    other = replace(TRAIN, stores=(world / "store",), out=world / "seen", text_only=True)
    with pytest.raises(SystemExit, match="other data"):
        train_diagnose.main(other)


def test_every_split_and_answerer_is_scored_and_answers_are_kept(world, monkeypatch):
    monkeypatch.chdir(world)
    args = replace(arguments(world), result="diagnosis")
    eval_diagnose.main(args)
    record = json.loads((world / "docs/results/diagnosis.json").read_text())
    figures = record["figures"]
    for name in ("detection_balanced_accuracy", "onset_within_10", "type_macro_accuracy"):
        for prefix in ("", "constant_", "text_only_"):
            assert f"{prefix}{name}" in figures
            for split in ("tasks", "types", "states"):
                assert f"{split}.{prefix}{name}" in figures
    assert figures["constant_detection_balanced_accuracy"]["value"] == 0.5
    assert (world / "eval/confusion_types.md").exists()
    rows = JsonLines(world / "eval/answers.jsonl").read()
    eval_diagnose.main(args)
    assert JsonLines(world / "eval/answers.jsonl").read() == rows


def test_without_a_model_it_says_how_to_make_one(world):
    with pytest.raises(SystemExit, match="regrasp train diagnose"):
        eval_diagnose.main(replace(arguments(world), model=world / "none"))
