"""Metrics against values worked out by hand and against scikit-learn; nothing is left out."""

import math
from dataclasses import replace

import numpy as np
import pytest
from regrasp.relabel.diagnose.answer import SUCCESS, Diagnosis, Unparseable, parse
from regrasp.relabel.diagnose.baselines import constant_answer, constant_answers
from regrasp.relabel.diagnose.metrics import NONE, UNPARSEABLE, compare, score
from sklearn.metrics import balanced_accuracy_score

SLIP = Diagnosis(True, "slip", 20, 39, "lift it", 2, "it slipped", "again", (0.05,) + (0.0,) * 6)
TYPES = ("slip", "freeze", "tilt")
NOTHING = Unparseable("", "empty answer")


def values(answers, truths, lengths=None):
    figures = score(answers, truths, lengths or [100] * len(truths)).figures
    return {name: figure.value for name, figure in figures.items()}


def test_a_right_answer_scores_best():
    assert values([SLIP, SUCCESS], [SLIP, SUCCESS]) == {
        "parsed": 1.0,
        "detection_balanced_accuracy": 1.0,
        "type_macro_accuracy": 1.0,
        "subtask_accuracy": 1.0,
        "interval_iou": 1.0,
        "onset_error": 0.0,
        "onset_within_10": 1.0,
        "severity_error": 0.0,
        "delta_cosine": pytest.approx(1.0),
        "delta_magnitude": 1.0,
    }


WORST = {
    "detection_balanced_accuracy": 0.0,
    "type_macro_accuracy": 0.0,
    "subtask_accuracy": 0.0,
    "interval_iou": 0.0,
    "onset_error": 79.0,  # from step 20 to the last, 99
    "onset_within_10": 0.0,
    "severity_error": 2.0,  # from 2 to 4
    "delta_cosine": -1.0,
    "delta_magnitude": 0.0,
}


def test_an_empty_answer_scores_worst():
    """RoboFAC's ``pred.lower() in ref.lower()`` gives an empty prediction full marks."""
    answer = parse("", types=TYPES, steps=100)
    assert values([answer], [SLIP]) == {"parsed": 0.0, **WORST}
    # Neither is it right about a success, which it also says nothing of.
    assert values([answer], [SUCCESS]) == {"parsed": 0.0, "detection_balanced_accuracy": 0.0}


def test_no_failure_seen_scores_worst_on_a_failure():
    assert values([SUCCESS], [SLIP]) == {"parsed": 1.0, **WORST}


def test_unparseable_answers_stay_in_every_mean():
    """AHA's fuzzy mean leaves out what could not be judged; three of four here are wrong."""
    got = values([SLIP, NOTHING, NOTHING, NOTHING], [SLIP] * 4)
    for name, worst in WORST.items():
        best = values([SLIP], [SLIP])[name]
        assert got[name] == pytest.approx((best + 3 * worst) / 4), name
    assert score([SLIP, NOTHING], [SLIP] * 2, [100] * 2).figures["interval_iou"].n == 2


def test_hand_computed_values():
    answer = replace(SLIP, start=31, end=50, severity=4, delta=(0.05, 0.05) + (0.0,) * 5)
    got = values([answer], [SLIP])
    assert got["interval_iou"] == pytest.approx(9 / 31)  # 31..39 of 20..50
    assert got["onset_error"] == 11
    assert got["onset_within_10"] == 0
    assert got["severity_error"] == 2
    assert got["delta_cosine"] == pytest.approx(1 / math.sqrt(2))
    assert got["delta_magnitude"] == pytest.approx(1 / math.sqrt(2))
    assert values([replace(answer, start=30)], [SLIP])["onset_within_10"] == 1
    assert values([replace(answer, start=45)], [SLIP])["interval_iou"] == 0
    assert values([replace(answer, subtask="lift")], [SLIP])["subtask_accuracy"] == 0


def test_delta_compares_metres_radians_and_fingers_in_action_units():
    fingers = replace(SLIP, delta=(0.05, 0, 0, 0.5, 0, 0, 1.0))
    got = values([SLIP], [fingers])
    assert got["delta_cosine"] == pytest.approx(1 / math.sqrt(3))
    twice = replace(SLIP, delta=(0.1,) + (0.0,) * 6)
    half = replace(SLIP, delta=(0.025,) + (0.0,) * 6)
    # Too long and too short do not cancel.
    assert values([twice, half], [SLIP] * 2)["delta_magnitude"] == pytest.approx(0.5)
    still = replace(SLIP, delta=(0.0,) * 7)
    assert values([still], [still])["delta_cosine"] == 1
    assert values([still], [SLIP])["delta_cosine"] == 0
    assert values([SLIP], [still])["delta_magnitude"] == 0


def random_answers(rng, n):
    def one():
        kind = rng.choice([*TYPES, NONE, UNPARSEABLE])
        if kind == UNPARSEABLE:
            return NOTHING
        return SUCCESS if kind == NONE else replace(SLIP, type=str(kind))

    truths = [one() for _ in range(n)]
    return [one() for _ in range(n)], [SUCCESS if t is NOTHING else t for t in truths]


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.parametrize("seed", range(5))
def test_balanced_accuracies_are_scikit_learns(seed):
    answers, truths = random_answers(np.random.default_rng(seed), 60)
    got = values(answers, truths)

    def label(answer):
        if answer is NOTHING:
            return UNPARSEABLE
        return answer.type if answer.failed else NONE

    failed = [t.failed for t in truths]
    said = [int(a.failed) if a is not NOTHING else 2 for a in answers]
    pairs = [(label(t), label(a)) for a, t in zip(answers, truths, strict=True) if t.failed]
    detection = balanced_accuracy_score(failed, said)
    types = balanced_accuracy_score(*zip(*pairs, strict=True))
    assert got["detection_balanced_accuracy"] == pytest.approx(detection)
    assert got["type_macro_accuracy"] == pytest.approx(types)


def test_confusion_counts_every_episode():
    freeze = replace(SLIP, type="freeze")
    truths = [SLIP, SLIP, SLIP, SUCCESS, SUCCESS]
    got = score([SLIP, freeze, NOTHING, SUCCESS, SLIP], truths, [100] * 5)
    assert got.truths == ("slip", NONE)
    assert got.answers == ("freeze", "slip", NONE, UNPARSEABLE)
    np.testing.assert_array_equal(got.confusion, [[1, 1, 0, 1], [0, 1, 1, 0]])


def test_intervals_hold_the_value_narrow_with_n_and_widen_with_groups():
    rng = np.random.default_rng(0)
    few = score(*random_answers(rng, 30), [100] * 30).figures
    answers, truths = random_answers(rng, 400)
    many = score(answers, truths, [100] * 400).figures
    tied = score(answers * 2, truths * 2, [100] * 800, groups=[*range(400)] * 2).figures
    for name, figure in many.items():
        assert figure.low <= figure.value <= figure.high
        assert figure.high - figure.low < few[name].high - few[name].low
        # Every episode twice says no more than once, if one says that they are the same.
        assert tied[name].low == pytest.approx(figure.low, abs=0.05 * (1 + abs(figure.low)))
    share = many["onset_within_10"]
    assert share.high - share.low == pytest.approx(
        2 * 1.96 * math.sqrt(share.value * (1 - share.value) / share.n), rel=0.15
    )


def test_resamples_without_a_class_do_not_break_the_interval():
    figure = score([SLIP] * 9 + [SUCCESS], [SLIP] * 9 + [SUCCESS], [100] * 10).figures
    assert figure["detection_balanced_accuracy"].low == 1.0


def test_not_as_many_of_everything():
    with pytest.raises(ValueError, match="1 answers, 2 truths"):
        score([SLIP], [SLIP, SLIP], [100, 100])
    with pytest.raises(ValueError, match="at least one"):
        score([], [], [])


def test_constant_answer_is_the_best_constant():
    others = [replace(SLIP, start=s, end=s + 9, severity=4) for s in (80, 82, 84, 86)]
    truths = [SLIP, replace(SLIP, type="freeze"), *others, SUCCESS]
    answer = constant_answer(truths)
    assert (answer.type, answer.severity, answer.end - answer.start) == ("slip", 4, 9)
    assert 76 <= answer.start <= 90
    cut = constant_answers(answer, [100, 50])
    assert parse(cut[0].text, types=TYPES, steps=100) == cut[0]
    assert cut[1].start == cut[1].end == 49
    figures = compare(
        {"": truths, "constant_": constant_answers(answer, [100] * 7)}, truths, [100] * 7
    )
    assert figures["detection_balanced_accuracy"].value == 1
    assert figures["constant_detection_balanced_accuracy"].value == 0.5
    assert figures["constant_type_macro_accuracy"].value == 0.5
    assert figures["constant_onset_within_10"].value == pytest.approx(4 / 6)
    with pytest.raises(ValueError, match="no failure"):
        constant_answer([SUCCESS])
