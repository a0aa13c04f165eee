"""The policy protocol, the small VLA and its training."""

import os

# OpenMP's threads spin while they wait for each other. On a machine that has anything else to do,
# two of them then spend their time waiting for a thread that is not running: measured at four
# times as many processes as cores, training ran below 1 window/s instead of 30. Read when torch
# is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
