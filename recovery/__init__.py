"""Rewind and the supervisor that acts on alarms."""
