"""The trainer: model, optimizer, loop, evaluation, checkpoints, sampling, metrics. Works without Dagster.

Invariant: for one RunSpec the batches, and up to reduction order the losses, are the same on any number of ranks, and
a run that was interrupted and resumed equals one that was not.
"""
