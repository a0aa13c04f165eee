"""Scripted experts that solve LIBERO tasks from privileged state through ordinary actions."""
