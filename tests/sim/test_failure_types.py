"""Types of injected failures: drawn alike everywhere, storable, in words, in the taxonomy."""

import json
import subprocess
import sys

import numpy as np
import pytest
from regrasp.sim.failures import INJECTIONS, from_json, get_injection
from regrasp.sim.failures.taxonomy import SOURCES, TAXONOMY, markdown

DRAWS = """
import json, numpy as np
from regrasp.sim.failures import INJECTIONS
draws = {
    f"{kind} {severity}": cls(severity=severity).draw(np.random.default_rng([7, 0]))
    for kind, cls in INJECTIONS.items()
    for severity in (0.25, 1.0)
}
print(json.dumps(draws))
"""


def test_the_same_seed_draws_the_same_at_any_severity_in_any_process():
    said = subprocess.run(
        [sys.executable, "-c", DRAWS], check=True, capture_output=True, text=True
    ).stdout
    elsewhere = json.loads(said.splitlines()[-1])
    for kind, cls in INJECTIONS.items():
        for severity in (0.0, 0.25, 1.0):
            here = cls(severity=severity).draw(np.random.default_rng([7, 0]))
            assert here == elsewhere[f"{kind} 0.25"] == elsewhere[f"{kind} 1.0"]


def test_every_kind_survives_json_and_has_words():
    for kind, cls in INJECTIONS.items():
        injection = cls(severity=0.5)
        assert cls.kind == kind
        assert from_json(json.loads(json.dumps(injection.to_json()))) == injection
        drawn = injection.draw(np.random.default_rng(0))
        assert drawn == json.loads(json.dumps(drawn))
        words = injection.words(drawn)
        assert set(words) == {"what", "amount"}
        assert all(words.values())
    assert get_injection("heavy") is INJECTIONS["heavy"]
    with pytest.raises(KeyError, match="did you mean early_release"):
        get_injection("early_releese")
    with pytest.raises(ValueError, match="0 to 1 is needed"):
        INJECTIONS["heavy"](severity=1.5)


def test_every_type_has_a_row_in_the_taxonomy_and_every_row_a_type():
    semantic = {kind for kind, row in TAXONOMY.items() if row.family == "semantic"}
    plans = {"wrong_object", "wrong_target", "wrong_order", "skipped_step", "wrong_instruction"}
    assert semantic == plans | {"distractor"}
    assert set(TAXONOMY) - semantic == set(INJECTIONS) - semantic
    for kind, cls in INJECTIONS.items():
        assert TAXONOMY[kind].family == cls.family
        assert TAXONOMY[kind].definition == cls.definition
    families = {row.family for row in TAXONOMY.values()}
    assert families == {"control", "physics", "semantic", "perception"}


def test_the_table_has_a_line_a_type():
    lines = markdown().splitlines()
    assert len(lines) == len(TAXONOMY) + 4
    assert {line.count(" | ") for line in lines[: len(TAXONOMY) + 2]} == {len(SOURCES) + 3}
    for key in SOURCES:
        assert any(getattr(row, key) for row in TAXONOMY.values())
