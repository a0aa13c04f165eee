"""LIBERO, LIBERO-PRO and robosuite environments, experts, perturbations, evaluation protocols."""
