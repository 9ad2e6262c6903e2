"""Receipts: where documents are, who saw them, what training without them costs; proof that they are gone."""
