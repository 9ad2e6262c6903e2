"""The forensics room: indexes and searches over exactly the rows that a checkpoint was pinned to.

Invariant: an answer about a checkpoint comes from its passport and the table alone, and says what it was computed from.
"""
