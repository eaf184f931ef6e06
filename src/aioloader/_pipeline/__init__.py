"""From requests to batches: how and where they are made, and their delivery.

::

    consumer ─BatchTask─▶ Pipeline ─▶ FetcherPool ─▶ CpuThread ─▶ ReadyQueue ─▶ consumer
                                      event loop     plain code   ordered, bounded

``plain`` and ``inline`` make batches where ``next`` is called. ``ahead_feed`` is the
consumer's side of a ``pipeline``, ``runner`` owns the threads and loops, and
``batch_maker`` calls the user's functions.
"""
