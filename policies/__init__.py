"""The policy protocol, the small VLA and its training."""
