"""The loss of every document under a checkpoint, as a column, and what it says."""
