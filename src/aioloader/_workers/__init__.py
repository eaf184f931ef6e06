"""Where CPU work runs: worker processes and worker threads.

::

    loader ──order──▶ template ──fork──▶ nursery ──fork──▶ workers
    loader ──requests──▶ whichever worker is free  (one socket that all read: they pull)
    loader ◀──results─── all workers               (one socket; batches stay in arenas)
    loader ◀──births and deaths─── nursery         (it is the parent that reaps them)

``pool`` is the loader's side, ``child`` the worker's; ``template`` and ``nursery``
start and reap processes, ``contexts`` does so by ``multiprocessing``. ``threads`` and
``executors`` are the other kinds of workers.
"""
