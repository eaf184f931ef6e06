"""Run under coverage, which is to see the lines that only workers run."""

from torch.utils.data import DataLoader


class Lines:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index < 0:
            return "never run"
        return only_in_workers(index)


def only_in_workers(index):
    return index + 1


print([batch.tolist() for batch in DataLoader(Lines(), 2, num_workers=2)])
