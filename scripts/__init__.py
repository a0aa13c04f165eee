"""One file a command; the only place that wires the parts together."""
