"""Failures that are made on purpose, and proven to be what they are called."""
