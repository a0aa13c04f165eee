"""What every training run here has in common: schedule, optimiser step, checkpoints, log."""
