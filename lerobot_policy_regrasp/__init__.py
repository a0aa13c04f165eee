"""LeRobot imports every installed distribution whose name begins with ``lerobot_policy_``.

Importing this one registers ``regrasp_vla`` and ``regrasp_libero``, for
``lerobot-train --policy.type=regrasp_vla`` and ``lerobot-eval --env.type=regrasp_libero``.
"""

from regrasp.policies.lerobot_plugin import RegraspVLAConfig, RegraspVLAPolicy
from regrasp.sim.lerobot_env import RegraspLiberoConfig

__all__ = ["RegraspLiberoConfig", "RegraspVLAConfig", "RegraspVLAPolicy"]
