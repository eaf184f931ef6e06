"""Access to files, object stores and HTTP: requests, retries and the local cache."""
