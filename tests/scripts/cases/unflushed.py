"""What the script has printed and not flushed is printed once, not by each worker."""

import atexit
import logging
import sys

from torch.utils.data import DataLoader

atexit.register(print, "bye")
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
file = open("results.txt", "w")
file.write("written once\n")
print("begun, ", end="")
sys.stdout.write("not flushed, ")


class Printing:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            print("of worker 0 (a)")
            logging.info("of worker 0 (b)")
        return index


batches = [batch.tolist() for batch in DataLoader(Printing(), 2, num_workers=1)]
print("ended", batches)
file.write("and once more\n")
file.close()
print(open("results.txt").read())
