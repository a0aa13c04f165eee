"""Hindsight relabelling, reward models and diagnosis."""
