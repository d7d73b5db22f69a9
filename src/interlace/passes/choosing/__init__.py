"""Which strategy a site gets: choose.py asks estimate.py, which plays candidates alone."""
