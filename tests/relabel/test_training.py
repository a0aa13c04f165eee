"""Fine-tuning: the answer's tokens alone, all weights or adapters, stopped and resumed."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from regrasp.episodes.jsonlines import JsonLines
from regrasp.relabel.diagnose.model import DiagnosisModel
from regrasp.relabel.diagnose.training import (
    Example,
    Trainer,
    TuneConfig,
    collate,
    shuffled,
    token_weights,
)
from squares import examples, small_model, squares

QUICK = TuneConfig(minutes=0, steps=6, batch=4, warmup=2, threads=1, bf16=False)


@pytest.fixture
def model():
    return small_model()


def test_loss_is_that_of_the_answers_tokens(model, tmp_path):
    """Against the plain way: one example at a time, no padding, all logits."""
    trainer = Trainer(tmp_path, model, QUICK)
    some = [examples(model)[0], examples(model)[4]]  # a long answer and a short one
    losses = []
    for example in some:
        inputs = model.inputs([example.question])
        answer = model.tokenizer(example.answer)["input_ids"] + [model.tokenizer.eos_token_id]
        asked = inputs["input_ids"].shape[1]
        ids = torch.cat([inputs["input_ids"], torch.tensor([answer])], dim=1)
        logits = model.model(
            input_ids=ids,
            pixel_values=inputs["pixel_values"],
            pixel_attention_mask=inputs["pixel_attention_mask"],
        ).logits[0, asked - 1 : -1]
        losses += torch.nn.functional.cross_entropy(
            logits, torch.tensor(answer), reduction="none"
        ).tolist()
    assert trainer.loss(some).item() == pytest.approx(np.mean(losses), rel=1e-4)
    trainer.keeps_logits = False  # as of a model that always gives them all
    assert trainer.loss(some).item() == pytest.approx(np.mean(losses), rel=1e-4)


def test_what_most_figures_look_at_can_weigh_more(model, tmp_path):
    some = [examples(model)[0], examples(model)[4]]  # a failure and a success
    _, labels = collate(model, some)
    weights = token_weights(model, some, labels, 8.0)
    first, second = (row[heavy] for row, heavy in zip(labels, weights == 8.0, strict=True))
    assert model.tokenizer.decode(first) == "\n".join(some[0].answer.split("\n")[:3])
    assert model.tokenizer.decode(second) == "failed: no"
    assert (weights == 0).equal(labels < 0)
    plain = Trainer(tmp_path / "a", model, QUICK).loss(some).item()
    assert Trainer(tmp_path / "b", model, replace(QUICK, focus=8.0)).loss(some).item() != plain


def test_batch_is_question_then_answer(model):
    some = examples(model)[3:5]
    inputs, labels = collate(model, some)
    width = inputs["input_ids"].shape[1] - labels.shape[1]
    assert inputs["attention_mask"].shape == inputs["input_ids"].shape
    for i, example in enumerate(some):
        answer = labels[i][labels[i] >= 0]
        assert model.tokenizer.decode(answer) == example.answer + model.tokenizer.eos_token
        row = inputs["input_ids"][i, width:][inputs["attention_mask"][i, width:].bool()]
        torch.testing.assert_close(row, answer)


def test_resumed_run_equals_unbroken_run(tmp_path):
    def trainer(name):
        return Trainer(tmp_path / name, small_model(), QUICK)

    data = examples(small_model())
    unbroken = trainer("a").run(shuffled(data, 5))
    first = trainer("b")
    source = shuffled(data, 5)
    for _ in range(3):
        first.train_step([next(source) for _ in range(QUICK.batch)])
    first.save()
    second = trainer("b")
    assert (second.step, second.seen) == (3, 12)
    resumed = second.run(shuffled(data, 5, start=second.seen))
    for name, value in unbroken.model.state_dict().items():
        torch.testing.assert_close(value, resumed.model.state_dict()[name], rtol=0, atol=0)
    assert [p.name for p in (tmp_path / "b").glob("step-*")] == ["step-6"]
    # A finished run has nothing left to do.
    again = trainer("b")
    assert again.progress == 1
    again.run(iter([]))


def test_killed_training_continues(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from squares import *; from regrasp.relabel.diagnose.training import *\n"
        "model = small_model()\n"
        "config = TuneConfig(minutes=0, steps=10**6, batch=4, threads=1, checkpoint_seconds=0.3)\n"
        f"Trainer({str(tmp_path)!r}, model, config).run(shuffled(examples(model), 0))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    model = small_model()
    trainer = Trainer(tmp_path, model, replace(QUICK, steps=10**6))
    assert trainer.step > 0
    assert trainer.seconds > 0
    steps = trainer.step + 10
    trainer = Trainer(tmp_path, small_model(), replace(QUICK, steps=steps))
    trainer.run(shuffled(examples(model), 0, start=trainer.seen))
    assert trainer.step == steps
    lines = JsonLines(tmp_path / "log.jsonl").read()
    assert lines[-1]["step"] > steps - 10
    assert list(tmp_path.glob("events.out.tfevents*"))


def test_lora_trains_only_adapters(model, tmp_path):
    episodes, _ = squares()
    untouched = {name: p.detach().clone() for name, p in model.model.named_parameters()}
    config = replace(QUICK, lora_rank=4, lr=1e-2)
    trainer = Trainer(tmp_path, model, config)
    assert all("lora_" in name for name in trainer.named)
    assert (
        0
        < sum(p.numel() for p in trainer.named.values())
        < sum(p.numel() for p in untouched.values()) / 4
    )
    data = examples(model)
    batches = shuffled(data, 0)
    losses = [trainer.train_step([next(batches) for _ in range(4)])["loss"] for _ in range(5)]
    assert losses[-1] < losses[0]
    base = {name: p for name, p in trainer.network.named_parameters() if "lora_" not in name}
    assert len(base) == len(untouched)
    for name, value in untouched.items():
        kept = next(p for n, p in base.items() if n.replace(".base_layer", "").endswith(name))
        torch.testing.assert_close(kept, value, rtol=0, atol=0)
    # The checkpoint is small, and adapters resume from it.
    folder = trainer.save()
    assert (folder / "tensors.safetensors").stat().st_size < 4 * sum(
        v.numel() for v in untouched.values()
    )
    resumed = Trainer(tmp_path, small_model(), config)
    for name, value in trainer.named.items():
        torch.testing.assert_close(resumed.named[name], value, rtol=0, atol=0)
    # Saved merged: an ordinary model, which writes what the adapted one does.
    written = trainer.loss(data[:2]).item()
    merged = resumed.finish()
    assert not any("lora_" in name for name in merged.model.state_dict())
    loaded = DiagnosisModel.load(tmp_path / "model")
    again = Trainer(tmp_path / "new", loaded, QUICK)
    assert again.loss(data[:2]).item() == pytest.approx(written, rel=1e-4)
    assert loaded.diagnose(episodes[:2]) == merged.diagnose(episodes[:2])


def test_the_average_is_what_is_saved(model, tmp_path):
    trainer = Trainer(tmp_path, model, replace(QUICK, ema=0.99))
    trainer.run(shuffled(examples(model), 0))
    saved = DiagnosisModel.load(tmp_path / "model").model.state_dict()
    for name, value in trainer.average.items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=0)


def test_another_model_does_not_resume(model, tmp_path):
    Trainer(tmp_path, model, QUICK).save()
    with pytest.raises(ValueError, match=r"of another network.*lora_"):
        Trainer(tmp_path, small_model(), replace(QUICK, lora_rank=2))
    with pytest.raises(ValueError, match=r"\{'batch': 4\}, now \{'batch': 8\}"):
        Trainer(tmp_path, small_model(), replace(QUICK, batch=8))


def test_any_iterable_will_do_and_its_end_is_the_end(model, tmp_path):
    trainer = Trainer(tmp_path, model, replace(QUICK, steps=100))
    trainer.run(iter(examples(model)))
    assert trainer.step == 2
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_a_time_limit_ends_it_with_the_schedule_at_its_end(model, tmp_path):
    trainer = Trainer(tmp_path, model, replace(QUICK, steps=0, minutes=1e-4))
    trainer.run(shuffled(examples(model), 0))
    assert trainer.step >= 1
    assert trainer.progress == 1
    assert trainer.learning_rate() <= QUICK.lr * QUICK.final_lr * 1.01


def test_shuffled_goes_through_all_and_resumes_anywhere():
    items = list("abcdefg")
    source = shuffled(items, 3)
    first = [next(source) for _ in range(30)]
    assert sorted(first[:7]) == sorted(first[7:14]) == items
    assert first[:7] != first[7:14]
    for start in (1, 7, 16):
        source = shuffled(items, 3, start=start)
        assert [next(source) for _ in range(10)] == first[start : start + 10]


def test_bfloat16_changes_the_loss_little_and_leaves_weights_alone(model, tmp_path):
    some = examples(model)[:2]
    exact = Trainer(tmp_path / "a", model, QUICK).loss(some).item()
    trainer = Trainer(tmp_path / "b", model, replace(QUICK, bf16=True))
    assert trainer.loss(some).item() == pytest.approx(exact, rel=0.02)
    trainer.train_step(some)
    assert {p.dtype for p in trainer.named.values()} == {torch.float32}


def test_settings_that_never_end_are_refused():
    with pytest.raises(ValueError, match="both 0"):
        TuneConfig(minutes=0, steps=0)
    with pytest.raises(ValueError, match="batch"):
        TuneConfig(batch=0)


def test_a_nan_stops_training(model, tmp_path):
    trainer = Trainer(tmp_path, model, QUICK)
    with torch.no_grad():
        next(iter(trainer.named.values())).fill_(float("nan"))
    question = examples(model)[0].question
    with pytest.raises(FloatingPointError, match="step 0"):
        trainer.train_step([Example(question, "failed: no")])
