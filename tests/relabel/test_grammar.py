"""Answers are held to their form: whatever a model wants to write, it can be parsed."""

from dataclasses import replace

import numpy as np
import pytest
from regrasp.relabel.diagnose.answer import Diagnosis, parse
from regrasp.relabel.diagnose.frames import FrameChoice, to_steps
from regrasp.relabel.diagnose.grammar import Grammar
from regrasp.relabel.diagnose.model import DiagnosisModel
from squares import CHOICE, STEPS, TYPES, examples, small_model, square_episode

BY_MOMENT = replace(CHOICE, count_by="moment")


@pytest.fixture(scope="module")
def grammar():
    model = small_model(BY_MOMENT)
    return Grammar(model.tokenizer, TYPES, BY_MOMENT), model.tokenizer


def walk(grammar, tokenizer, rng):
    """An answer of random tokens among those allowed."""
    tokens: list[int] = []
    while True:
        allowed = grammar.after(tokenizer.decode(tokens))
        assert allowed, tokenizer.decode(tokens)
        token = int(rng.choice(allowed))
        if token == tokenizer.eos_token_id:
            return tokenizer.decode(tokens)
        tokens.append(token)
        assert len(tokens) < 2000


def test_any_allowed_answer_parses(grammar):
    steps = np.linspace(0, STEPS - 1, CHOICE.frames).astype(int)
    found = set()
    for seed in range(40):
        text = to_steps(walk(*grammar, np.random.default_rng(seed)), steps)
        answer = parse(text, types=TYPES, steps=STEPS)
        assert isinstance(answer, Diagnosis), (text, answer.reason)
        found.add(answer.failed)
    assert found == {True, False}


def test_right_answers_are_allowed_token_by_token(grammar):
    held, tokenizer = grammar
    model = small_model(BY_MOMENT)
    for example in examples(model):
        from regrasp.relabel.diagnose.frames import to_moments

        text = to_moments(example.answer, example.question.steps)
        tokens = tokenizer(text)["input_ids"]
        for i, token in enumerate(tokens):
            assert token in held.after(tokenizer.decode(tokens[:i])), tokenizer.decode(tokens[:i])
        assert held.after(text) == [tokenizer.eos_token_id]


def test_an_untrained_model_writes_answers():
    model = small_model(BY_MOMENT)
    answers = model.diagnose([square_episode(i) for i in range(2)])
    assert all(isinstance(answer, Diagnosis) for answer in answers)
    free = DiagnosisModel(model.model, model.processor, TYPES, CHOICE)
    assert not isinstance(free.diagnose([square_episode(0)])[0], Diagnosis)


def test_steps_are_not_held():
    model = small_model()
    with pytest.raises(ValueError, match="count_by='moment'"):
        Grammar(model.tokenizer, TYPES, FrameChoice())
