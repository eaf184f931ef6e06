"""Settings of the process that are made once at the top, and meant for everything."""

import decimal
import logging
import os
import pathlib
import resource
import socket
import sys
import warnings

import numpy as np
import PIL.ImageFile
import torch
from torch.utils.data import DataLoader

PIL.ImageFile.LOAD_TRUNCATED_IMAGES = True
np.seterr(divide="raise")
np.set_printoptions(precision=3)
torch.set_default_dtype(torch.float64)
torch.use_deterministic_algorithms(True)
torch.set_printoptions(precision=2)
os.environ["DATA_ROOT"] = "here"
os.environ.pop("HOME", None)
os.umask(0o027)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
resource.setrlimit(
    resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
)
logging.basicConfig(
    level=logging.WARNING, stream=sys.stdout, format="%(name)s %(message)s"
)
logging.getLogger("noisy").setLevel(logging.DEBUG)
warnings.filterwarnings("error", message="mind this")
socket.setdefaulttimeout(7)
sys.setrecursionlimit(3000)
decimal.getcontext().prec = 5
pathlib.Path("plugins").mkdir()
pathlib.Path("plugins", "plugin_of_mine.py").write_text("VALUE = 1\n")
sys.path.insert(0, pathlib.Path("plugins"))
sys.path.insert(0, "plugins")
import plugin_of_mine

plugin_of_mine.VALUE = 42
CONFIG = {"scale": 1}
CONFIG["scale"] = 3


class Settings:
    """Each sample is one setting as the worker sees it."""

    def __len__(self):
        return 18

    def __getitem__(self, index):
        try:
            divided = str(np.float64(1) / 0)
        except FloatingPointError:
            divided = "raised"
        try:
            warnings.warn("mind this")
            warned = "shown"
        except UserWarning:
            warned = "raised"
        return [
            f"truncated {PIL.ImageFile.LOAD_TRUNCATED_IMAGES}",
            f"divide {divided}",
            f"numpy {np.array([1 / 3])}",
            f"dtype {torch.get_default_dtype()}",
            f"deterministic {torch.are_deterministic_algorithms_enabled()}",
            f"torch {torch.tensor([1 / 3])}",
            f"environment {os.environ.get('DATA_ROOT')} {'HOME' in os.environ}",
            f"umask {os.umask(0o027):o}",
            f"affinity {len(os.sched_getaffinity(0))}",
            f"files {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}",
            f"logging {logging.getLogger().level} {logging.getLogger('noisy').level}",
            f"warning {warned}",
            f"timeout {socket.getdefaulttimeout()}",
            f"recursion {sys.getrecursionlimit()}",
            f"decimal {decimal.Decimal(1) / 3}",
            f"plugin {plugin_of_mine.VALUE}",
            f"config {CONFIG}",
            f"main {__name__} {sys.argv[1:]} {type(sys.path[1]).__name__}",
        ][index]


for batch in DataLoader(Settings(), batch_size=3, num_workers=2):
    print(*batch, sep="\n")
