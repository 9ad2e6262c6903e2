"""Where a text may come from: shared runs of tokens, who was trained on them and when, and a gradient's influence."""
