"""regrasp closes the failure loop of robot policies: monitor, recover, relabel, post-train."""
