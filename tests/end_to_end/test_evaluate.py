"""``regrasp eval``: a wrong instruction makes sense in the scene, and is wrong."""

import pytest
from regrasp.scripts.evaluate import wrong_instruction
from regrasp.sim import get_task
from regrasp.sim.tasks import scene_objects, twin_instructions


def test_in_a_spatial_scene_it_means_the_other_bowl():
    for k in range(10):
        task = get_task("libero_spatial", k)
        told = {wrong_instruction("libero_spatial", k, state) for state in range(30, 50)}
        assert told == set(twin_instructions(task).values())
        assert task.instruction not in told


def test_in_an_object_scene_it_means_another_object():
    tasks = {task.instruction: task for task in (get_task("libero_object", k) for k in range(10))}
    for own in tasks.values():
        told = {wrong_instruction("libero_object", own.index, state) for state in range(30, 50)}
        assert len(told) > 1
        for instruction in told:
            assert instruction != own.instruction
            assert scene_objects(tasks[instruction])[0] in scene_objects(own)


@pytest.mark.parametrize("suite", ["libero_goal", "libero_spatial_swap"])
def test_elsewhere_it_is_any_other_tasks(suite):
    instructions = [get_task(suite, k).instruction for k in range(10)]
    told = {wrong_instruction(suite, 1, state) for state in range(30, 50)}
    assert len(told) > 2
    assert told <= set(instructions) - {instructions[1]}
    assert wrong_instruction(suite, 1, 30) == wrong_instruction(suite, 1, 30)
