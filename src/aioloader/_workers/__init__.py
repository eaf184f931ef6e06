"""Where CPU work runs: worker processes, threads, executors and Ray actors.

::

    loader ──fork──▶ supervisor ──fork──▶ workers     (sync datasets, as torch does)
    loader ──order──▶ fork server ──fork──▶ supervisor ──fork──▶ workers
    loader ──requests──▶ whichever worker is free  (one socket that all read: they pull)
    loader ◀──results─── all workers               (one socket; batches stay in arenas)
    loader ◀──starts and deaths─── supervisor      (it is the parent that reaps them)

In ``process/``, ``start`` chooses how workers start, ``launch`` is the loader's handle
on a supervisor, ``spawn`` does without one. ``pool`` is the loader's side of the
workers, ``worker_main`` the worker's. ``threads``, ``executors`` and ``ray/`` are the
other kinds of workers.
"""
