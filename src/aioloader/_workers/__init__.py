"""Workers: the processes, threads, executors and Ray actors that do CPU work.

::

    loader ──fork──▶ supervisor ──fork──▶ workers     (sync datasets, as torch does)
    loader ──order──▶ fork server ──fork──▶ supervisor ──fork──▶ workers
    loader ──requests──▶ any free worker           (workers pull from one shared socket)
    loader ◀──results─── all workers               (socket or pipe; arenas hold batches)
    loader ◀──starts and deaths─── supervisor      (the workers' parent; reaps them)

In ``process/``, ``launcher`` is the loader's handle on a supervisor, which the loader's
process or the ``fork_server`` forks. ``pool`` is the loader's side, ``worker_main`` the
worker's side, and ``messages`` defines what they send. ``portable`` does not fork.
``threads``, ``executors`` and ``ray/`` are the other kinds of workers.
"""
