"""Tar archives cut into samples: headers, members and groups of members."""
