"""The curation room: signals about documents as columns; decisions are SQL filters over them, never copies.

Invariant: a row that was judged keeps its judgement when rows are appended.
"""
