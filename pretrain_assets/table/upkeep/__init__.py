"""The table looked after: `maintain` plans and reports; `compaction`, `retention` and `leftovers` each do one thing."""
