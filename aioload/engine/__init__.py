"""The engine: from an index stream to batches in the consumer's hands.

In the order a batch meets them: :mod:`.settings` (what was asked for), :mod:`.source` (a dataset seen through its
protocol), :mod:`.indices` (the index stream), :mod:`.window` and :mod:`.memory` (how far ahead), :mod:`.recipe`,
:mod:`.tolerance` and :mod:`.batch` (a batch under way, and what becomes of samples that fail), :mod:`.fetchers`,
:mod:`.staged`, :mod:`.awaited` and :mod:`.whole` (what is done for it, by kind of dataset: :mod:`.choice`),
:mod:`.pools`, :mod:`.tuner` and :mod:`.tasks` (who does it), :mod:`.portal` (the loop thread), :mod:`.delivery`,
:mod:`.order` and :mod:`.handoff` (back to the consumer), :mod:`.patience` (who waits), :mod:`.run` (one pass over the
data), :mod:`.inline` (the same without threads), :mod:`.crew` (the threads of a pass), :mod:`.passes` (what an iterator
holds, and how it ends), :mod:`.runtime` and :mod:`.appearance` (what the passes of one loader share, and whether one
that began early still holds). :mod:`.aside` makes blocking calls beside a running loop.
"""
