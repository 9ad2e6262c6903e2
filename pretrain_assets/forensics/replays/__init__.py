"""Counterfactual replay: a run again without some documents, and how it compares."""
