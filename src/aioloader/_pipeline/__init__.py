"""From requests to batches: the stages, where they run, and the hand-over.

::

    consumer ─BatchTask─▶ Pipeline ─▶ FetcherPool ─▶ CpuThread ─▶ ReadyQueue ─▶ consumer
                                      event loop     plain code   ordered, bounded

``source`` decides how an epoch is driven (inline, gathered, hosted), ``host`` owns the
loop and the thread it is hosted on, ``maker`` holds the user's functions.
"""
