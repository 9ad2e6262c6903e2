"""Contamination in time: when a run saw evaluation items, so which scores stand."""
