"""Where CPU task runs: worker processes and worker threads.

::

    loader ──fork──▶ supervisor ──fork──▶ workers     (sync datasets, as torch does)
    loader ──order──▶ fork server ──fork──▶ supervisor ──fork──▶ workers
    loader ──requests──▶ whichever worker is free  (one socket that all read: they pull)
    loader ◀──results─── all workers               (one socket; batches stay in arenas)
    loader ◀──births and deaths─── supervisor      (it is the parent that reaps them)

``start`` chooses how workers start, ``launch`` is the loader's handle on a supervisor,
``spawn`` does without one. ``pool`` is the loader's side of the workers, ``child`` the
worker's. ``threads`` and ``executors`` are the other kinds of workers.
"""
