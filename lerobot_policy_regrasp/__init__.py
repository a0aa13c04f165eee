"""LeRobot imports every installed distribution whose name begins with ``lerobot_policy_``.

Importing this one registers ``regrasp_vla``, so that ``lerobot-train --policy.type=regrasp_vla``
and ``lerobot-eval`` know it.
"""

from regrasp.policies.lerobot_plugin import RegraspVLAConfig, RegraspVLAPolicy

__all__ = ["RegraspVLAConfig", "RegraspVLAPolicy"]
