"""The engine: from an index stream to batches in the consumer's hands.

In the order a batch meets them: :mod:`.source` (a dataset seen through its protocol), :mod:`.indices` (the
index stream), :mod:`.window` (how far ahead), :mod:`.pools` and :mod:`.tasks` (who does the work),
:mod:`.batch` (a batch under way), :mod:`.fetchers` (what is done per sample), :mod:`.portal` (the loop thread),
:mod:`.order` and :mod:`.handoff` (back to the consumer), :mod:`.run` (one pass over the data), :mod:`.inline`
(the same without threads), :mod:`.runtime` (what the passes of one loader share).
"""
