"""What every room uses: threads, forks, waits, failures, records, warnings."""
