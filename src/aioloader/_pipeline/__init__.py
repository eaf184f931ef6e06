"""From requests to batches: the stages, where they run, and the hand-over.

::

    consumer ──Work──▶ Run ──▶ Crew ──────▶ CpuThread ──▶ ReadyQueue ──▶ consumer
                       routes   event loop   plain code    ordered, bounded

``source`` decides how an epoch is driven (inline, gathered, hosted), ``home`` owns the
loop and the thread it is hosted on, ``recipe`` holds the user's functions.
"""
