"""Make the requested batches in threads, event loops or workers, and deliver them.

::

    consumer ─BatchTask─▶ Pipeline ─▶ FetcherPool ─▶ CpuThread ─▶ ReadyQueue ─▶ consumer
                                      event loop     plain code   ordered, bounded

``plain`` and ``inline`` make batches in the thread that calls ``next``. ``pipeline``
makes them in the background, for the feed in ``ahead_feed``. ``runner`` owns the
threads and loops. ``batch_maker`` calls the user's functions.
"""
