"""Real arms: limits, watchdogs, the policy server and the ROS 2 node."""
