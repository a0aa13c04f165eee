"""Failure scores, conformal calibration and alarm rules."""
