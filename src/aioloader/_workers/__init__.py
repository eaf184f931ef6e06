"""Workers: the processes, threads, executors and Ray actors that do CPU work.

::

    loader ──fork──▶ supervisor ──fork──▶ workers     (sync datasets, as torch does)
    loader ──order──▶ fork server ──fork──▶ supervisor ──fork──▶ workers
    loader ──requests──▶ any free worker           (workers pull from one shared socket)
    loader ◀──results─── all workers               (one socket; batches stay in arenas)
    loader ◀──starts and deaths─── supervisor      (the workers' parent; reaps them)

In ``process/``, ``launcher`` is the loader's handle on a supervisor, which is forked
from this process or by the ``fork_server``. ``pool`` is the loader's side of a pool,
``worker_main`` is the worker's side, and ``messages`` defines what they send.
``threads``, ``executors`` and ``ray/`` are the other kinds of workers.
"""
