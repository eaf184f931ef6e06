"""Make batches for requests in threads, event loops or workers, and deliver them.

::

    consumer ─BatchTask─▶ Pipeline ─▶ FetcherPool ─▶ CpuThread ─▶ ReadyQueue ─▶ consumer
                                      event loop     plain code   ordered, bounded

``plain`` and ``inline`` make batches in the thread that calls ``next``. ``pipeline``
makes them in the background, and ``ahead_feed`` is its consumer's side. ``runner`` owns
the threads and loops. ``batch_maker`` calls the user's functions.
"""
