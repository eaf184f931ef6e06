"""``assert_resumes_exactly`` in this process: a new one takes seconds to start."""

from functools import partial

from aioloader import testing

assert_resumes_exactly = partial(testing.assert_resumes_exactly, new_process=False)
assert_resumes_exactly_async = partial(
    testing.assert_resumes_exactly_async, new_process=False
)
