"""Move batches to a device ahead of the step that needs them.

``stage`` is a queue of batches between the pipeline and the consumer. ``mover`` decides
how each leaf of a batch is moved, ``leaves`` walks the batch's containers, and
``accelerator`` makes the calls on streams, events and page-locked memory.
"""
