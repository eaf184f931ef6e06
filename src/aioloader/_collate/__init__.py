"""Combine samples into a batch: collate, gather, pad."""
