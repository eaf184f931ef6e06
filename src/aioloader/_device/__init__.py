"""Move batches to a device ahead of the step that needs them.

``stage`` holds the batches between the pipeline and the consumer, ``mover`` decides how
each leaf of a batch is moved, ``leaves`` walks its containers, and ``accelerator``
makes the calls on streams, events and page-locked memory.
"""
