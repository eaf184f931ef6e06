"""Only ``make compat``, whose environment has the packages, runs these tests."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("lightning") else ["*"]
