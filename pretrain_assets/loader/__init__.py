"""The road from a pinned table version to blocks of tokens: plan, packing, streaming and exposure arithmetic.

Invariant: which tokens stand in which block is a pure function of (pin, filter, seed, epoch, num_splits, seq_len); the
number of ranks only decides who reads them.
"""
