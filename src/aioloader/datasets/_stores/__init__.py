"""Where bytes lie: files, object stores and HTTP; requests, and the local cache."""
