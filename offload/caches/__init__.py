"""Which tokens a pass attends to: all, a retrieved selection, a window, those that were not evicted."""
