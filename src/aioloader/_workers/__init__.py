"""Where CPU work runs: worker processes, threads, executors and Ray actors.

::

    loader ──fork──▶ supervisor ──fork──▶ workers     (sync datasets, as torch does)
    loader ──order──▶ fork server ──fork──▶ supervisor ──fork──▶ workers
    loader ──requests──▶ any free worker           (workers pull from one shared socket)
    loader ◀──results─── all workers               (one socket; batches stay in arenas)
    loader ◀──starts and deaths─── supervisor      (the workers' parent; reaps them)

In ``process/``, ``start`` chooses how workers start, ``launch`` is the loader's handle
on a supervisor, ``spawn`` needs none. ``pool`` is the loader's side of the workers,
``worker_main`` the worker's. ``threads``, ``executors`` and ``ray/`` are the other
kinds of workers.
"""
