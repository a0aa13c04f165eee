"""What another process does with a snapshot."""

from regrasp.sim import make_env
from regrasp.sim.snapshot import Snapshot


def continue_from(job):
    """(states [h, 8], last picture, qpos, success) after the actions, from the snapshot."""
    suite, task, config, content, actions = job
    env = make_env(suite, task, **config)
    env.restore(Snapshot.from_bytes(content))
    before = env.observe()["agentview"]
    chunk = env.step_chunk(actions)
    answer = (
        before,
        chunk.states,
        chunk.observations[-1]["agentview"],
        env.data.qpos.copy(),
        env.steps,
    )
    env.close()
    return answer
