"""One rank of DLIO: its own ``main``.

DLIO imports TensorFlow for a profiler that no workload here uses; an empty module saves
300 MB of packages and the seconds that their import takes.
"""

import sys
import types

sys.modules["tensorflow"] = types.ModuleType("tensorflow")

from dlio_benchmark.main import main  # noqa: E402

if __name__ == "__main__":
    main()
